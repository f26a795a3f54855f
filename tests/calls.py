"""Calls of an `LLM` that many tests make."""

from octavo import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_alive(llm: LLM) -> None:
    """The engine answers as ever and holds nothing."""
    assert ids(llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)) == [[4, 5, 6, 7, 8, 9, 10, 11]]
    metrics = llm.get_metrics()
    assert (metrics.running, metrics.waiting, metrics.kv_blocks_free) == (0, 0, metrics.kv_blocks_total)
