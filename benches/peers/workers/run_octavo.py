"""octavo, as `LLM` loads it without options, `OCTAVO_DTYPE` apart."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, cast

from protocol import Timeline, serve

if TYPE_CHECKING:
    from protocol import Engine


class Octavo:
    """A loaded `LLM`."""

    def __init__(self, model: str, threads: int) -> None:
        """Load `model`, a file, a folder or a pulled model's name."""
        from octavo import LLM

        self.dtype = os.environ.get("OCTAVO_DTYPE", "auto")
        self.llm = LLM(model, threads=threads, dtype=self.dtype)

    def facts(self) -> dict[str, Any]:
        """What the limits of the machine are compared with."""
        import octavo

        memory = self.llm.memory
        return {
            "version": octavo.__version__,
            "dtype": self.dtype,
            "bytes_per_token": memory["bytes_per_token"],
            "layer_weights": memory["layer_weights"],
        }

    def run(self, requests: list[dict[str, Any]], measure: str) -> Timeline:
        """One call of `generate`; the first token's time is from its story, by the same clock."""
        from octavo import SamplingParams

        self.llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": each["prompt_token_ids"]} for each in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=each["max_tokens"], ignore_eos=True, detokenize=False)
            for each in requests
        ]
        submitted = time.monotonic()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        ended = time.monotonic()
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        first = ended
        if measure == "decode":
            stories = [output.metrics for output in outputs if output.metrics is not None]
            first = max(story.first_token_time for story in stories)
            ended = max(story.last_token_time for story in stories)
        return Timeline(submitted, first, ended, tokens)


def limits(engine: Engine, case: str) -> dict[str, Any] | None:
    """What the machine can do at the moment, for the case `limits`."""
    if case != "limits":
        return None
    from octavo.doctor import dot_peak, read_bandwidth

    llm = cast("Octavo", engine).llm
    return {
        "read_gb_s": read_bandwidth(llm.threads),
        "reread_gb_s": read_bandwidth(llm.threads, llm.memory["bytes_per_token"]),
        "dot_gops": dot_peak(llm.threads),
        "kernel_gops": llm.measure_product_rate(),
    }


if __name__ == "__main__":
    serve(Octavo, limits)
