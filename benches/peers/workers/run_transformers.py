"""transformers on a folder in bf16: static batches, padded on the left, each as long as its longest request."""

from __future__ import annotations

import time
from typing import Any

from protocol import Timeline, serve

MOST_STREAMS = 32
"""Requests of one batch."""


class Transformers:
    """A loaded model."""

    def __init__(self, model: str, threads: int) -> None:
        """Load `model`."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def facts(self) -> dict[str, Any]:
        """Versions."""
        import torch
        import transformers

        return {"version": f"{transformers.__version__} on torch {torch.__version__}"}

    def run(self, requests: list[dict[str, Any]], measure: str) -> Timeline:
        """One batch after the other, in the order of the requests."""
        del measure
        import torch

        submitted = first = time.perf_counter()
        with torch.inference_mode():
            for start in range(0, len(requests), MOST_STREAMS):
                first = self._batch(requests[start : start + MOST_STREAMS])
        tokens = sum(each["max_tokens"] for each in requests)
        return Timeline(submitted, first, time.perf_counter(), tokens)

    def _batch(self, requests: list[dict[str, Any]]) -> float:
        """Compute a batch; returns when its first tokens were there."""
        import torch
        from transformers import DynamicCache

        prompts = [each["prompt_token_ids"] for each in requests]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        padded = bool((mask == 0).any())
        cache = DynamicCache()
        first = 0.0
        for step in range(max(each["max_tokens"] for each in requests)):
            logits = self.model(
                input_ids=ids,
                attention_mask=mask if padded else None,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            positions = positions[:, -1:] + 1
            if padded:
                mask = torch.cat([mask, mask.new_ones(len(requests), 1)], dim=1)
            # To read an id is to wait for it.
            ids[0].item()
            if step == 0:
                first = time.perf_counter()
        return first


if __name__ == "__main__":
    serve(Transformers)
