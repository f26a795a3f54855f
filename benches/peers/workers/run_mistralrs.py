"""mistralrs on a GGUF file: one request at a time, by a text of as many tokens as the prompt has.

It takes no token ids, and calls from several threads fail. Times are those it reports itself.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from protocol import Timeline, Unsupported, serve

WORDS = (" paper", " sheet", " page", " book", " leaf", " fold")


class Mistralrs:
    """A loaded `Runner`."""

    def __init__(self, model: str, threads: int) -> None:
        """Load `model`; its threads follow the CPU mask and `RAYON_NUM_THREADS`."""
        del threads
        import mistralrs

        path = Path(model)
        which = mistralrs.Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
        self.runner = mistralrs.Runner(which=which, prefix_cache_n=0)
        self.words = [word for word in WORDS if len(self._tokens(word * 8)) == 8]
        if not self.words:
            raise RuntimeError(f"{model}: none of {WORDS} is one token")
        # Completion may put a control token before the text.
        self.added = self._send(" paper" * 8, 1).prompt_tokens - 8
        self.turn = 0

    def facts(self) -> dict[str, Any]:
        """Version."""
        from importlib.metadata import version

        return {"version": version("mistralrs")}

    def run(self, requests: list[dict[str, Any]], measure: str) -> Timeline:
        """One request."""
        del measure
        if len(requests) > 1:
            raise Unsupported("one request at a time")
        [request] = requests
        # Begins elsewhere each time, should anything be cached.
        self.turn += 1
        length = len(request["prompt_token_ids"]) - self.added
        text = "".join(self.words[(self.turn + index * index) % len(self.words)] for index in range(length))
        submitted = time.perf_counter()
        usage = self._send(text, request["max_tokens"])
        if usage.prompt_tokens != length + self.added:
            raise ValueError(f"prompt tokens: found {usage.prompt_tokens}, expected {length + self.added}")
        first = submitted + usage.total_prompt_time_sec
        return Timeline(submitted, first, first + usage.total_completion_time_sec, usage.completion_tokens)

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self.runner.tokenize_text(text, add_special_tokens=False, enable_thinking=None)
        return found

    def _send(self, text: str, max_tokens: int) -> Any:
        import mistralrs

        request = mistralrs.CompletionRequest(
            prompt=text, model="default", max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        )
        return self.runner.send_completion_request(request).usage


if __name__ == "__main__":
    serve(Mistralrs)
