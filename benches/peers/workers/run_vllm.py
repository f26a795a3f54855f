"""vLLM's CPU build on a folder in bf16, compiled, with its prefix cache."""

from __future__ import annotations

import os
import time
from typing import Any

from protocol import Timeline, serve


class Vllm:
    """A loaded `LLM` in this process."""

    def __init__(self, model: str, threads: int) -> None:
        """Load `model`; the threads are set by `VLLM_CPU_OMP_THREADS_BIND`."""
        del threads
        from vllm import LLM

        self.llm = LLM(
            model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_prefix_caching=True,
            disable_log_stats=True,
            max_num_seqs=64,
        )

    def facts(self) -> dict[str, Any]:
        """Version and what was preloaded."""
        from importlib.metadata import version

        return {"version": version("vllm-cpu"), "preloaded": os.environ.get("LD_PRELOAD", "")}

    def run(self, requests: list[dict[str, Any]], measure: str) -> Timeline:
        """One call of `generate`, or the engine's own steps where the first token's time is needed."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its prefix cache")
        return self._stepped(requests) if measure == "decode" else self._generated(requests)

    def _generated(self, requests: list[dict[str, Any]]) -> Timeline:
        prompts = [{"prompt_token_ids": each["prompt_token_ids"]} for each in requests]
        params = [_params(each["max_tokens"]) for each in requests]
        submitted = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        ended = time.perf_counter()
        return Timeline(submitted, ended, ended, sum(len(output.outputs[0].token_ids) for output in outputs))

    def _stepped(self, requests: list[dict[str, Any]]) -> Timeline:
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        submitted = time.perf_counter()
        for index, each in enumerate(requests):
            params = _params(each["max_tokens"], output_kind=RequestOutputKind.DELTA)
            engine.add_request(str(index), {"prompt_token_ids": each["prompt_token_ids"]}, params)
        first, tokens, seen = submitted, 0, set()
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens += len(output.outputs[0].token_ids)
                if output.request_id not in seen:
                    seen.add(output.request_id)
                    first = time.perf_counter()
        return Timeline(submitted, first, time.perf_counter(), tokens)


def _params(max_tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **more)


if __name__ == "__main__":
    serve(Vllm)
