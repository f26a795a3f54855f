"""A thousand requests on a real model."""

from pathlib import Path

from octavo import LLM, SamplingParams

BATCHES = 20
PROMPTS = [f"A list of things that number {count}:" for count in range(50)]


def resident_bytes() -> int:
    """Memory of this process that no file backs: mapped files come and go as the kernel likes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def test_nothing_grows_over_a_thousand_requests(smollm2: LLM) -> None:
    params = [SamplingParams(max_tokens=1 + count % 16, logprobs=2) for count in range(len(PROMPTS))]
    sizes = []
    for _ in range(BATCHES):
        smollm2.generate(PROMPTS, params, use_tqdm=False)
        sizes.append(resident_bytes())
    metrics = smollm2.get_metrics()
    assert sum(metrics.requests_finished.values()) >= BATCHES * len(PROMPTS)
    assert metrics.kv_blocks_used == 0
    assert max(sizes[BATCHES // 2 :]) - min(sizes[BATCHES // 4 : BATCHES // 2]) < 2**20, sizes
