"""What masks cost: the share of a step that structured outputs take, eight answers at a time, over ten schemas.

    .venv/bin/python tools/mask_cost.py smollm2-135m

The first line is a run that does not count: the vocabulary is made a tree in it, and the schemas are compiled.
"""

import json
import sys
from pathlib import Path

from octavo import LLM, SamplingParams, StructuredOutputsParams

SCHEMAS = Path(__file__).parents[1] / "tests" / "data" / "structured_schemas.json"


def main() -> None:
    """Measure six times."""
    schemas = list(json.loads(SCHEMAS.read_text(encoding="utf-8")).values())
    params = [
        SamplingParams(
            temperature=1.5,
            seed=seed,
            max_tokens=128,
            structured_outputs=StructuredOutputsParams(json=schemas[seed % len(schemas)]),
        )
        for seed in range(64)
    ]
    prompts = [f"Item {index}:" for index in range(len(params))]
    with LLM(sys.argv[1], kv_cache_memory_bytes=256 << 20, max_num_seqs=8) as llm:
        for turn in range(6):
            before = llm.get_metrics()
            llm.generate(prompts, params, use_tqdm=False)
            after = llm.get_metrics()
            asked, busy = after.mask_seconds - before.mask_seconds, after.busy_seconds - before.busy_seconds
            masks, steps = after.masks - before.masks, after.steps - before.steps
            print(
                f"{turn or 'warm-up'}: masks take {asked / busy:.1%} of {busy / steps * 1e3:.1f} ms a step, "
                f"{asked / masks * 1e6:.0f} us each, {masks / steps:.1f} a step"
            )


if __name__ == "__main__":
    main()
