"""llama.cpp through the low-level functions of llama-cpp-python, batched as its own server does it.

Each step holds one token of each running request and as much of the waiting prompts as fits beside them. What all
requests begin with is computed once and copied. A token is picked by numpy's argmax, faster than the library's sampler.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp
import numpy as np
from protocol import Timeline, serve

MOST_STREAMS = 32
"""Requests that run at once; more wait."""
BATCH = 2048
LEAST_SHARED = 64
"""Tokens that must be common to all requests for copying to pay."""


class Batch:
    """The arrays of a `llama_batch`, filled by numpy."""

    def __init__(self) -> None:
        """Take room for `BATCH` tokens."""
        self.token, self.position, self.count, self.sequence = (np.ones(BATCH, dtype=np.int32) for _ in range(4))
        self.wanted = np.zeros(BATCH, dtype=np.int8)
        self.pointers = self.sequence.ctypes.data + 4 * np.arange(BATCH, dtype=np.uint64)
        self.used = 0
        to_int, to_byte = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        self.native = llama_cpp.llama_batch(
            n_tokens=0,
            token=self.token.ctypes.data_as(to_int),
            embd=None,
            pos=self.position.ctypes.data_as(to_int),
            n_seq_id=self.count.ctypes.data_as(to_int),
            seq_id=self.pointers.ctypes.data_as(ctypes.POINTER(to_int)),
            logits=self.wanted.ctypes.data_as(to_byte),
        )

    def add(self, tokens: list[int], start: int, sequence: int, *, wanted: bool) -> int:
        """Add tokens at positions from `start`; the last one's logits may be wanted. Returns the last one's row."""
        rows = slice(self.used, self.used + len(tokens))
        self.token[rows] = tokens
        self.position[rows] = np.arange(start, start + len(tokens))
        self.sequence[rows] = sequence
        self.wanted[rows] = 0
        self.used += len(tokens)
        self.wanted[self.used - 1] = wanted
        return self.used - 1


class Stream:
    """A running request."""

    def __init__(self, request: dict[str, Any], computed: int) -> None:
        """`computed` tokens of the prompt are in the cache."""
        self.prompt: list[int] = request["prompt_token_ids"]
        self.left: int = request["max_tokens"]
        self.computed = computed
        self.pending = self.prompt[computed:]


class LlamaCpp:
    """A loaded GGUF file, and a context for the shape of the last run."""

    def __init__(self, model: str, threads: int) -> None:
        """Load `model`, quietly."""
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"{model}: llama.cpp cannot load it")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.threads = threads
        self.shape = (0, 0, False)
        self.context: Any = None
        self.batch = Batch()

    def facts(self) -> dict[str, Any]:
        """Version and what the library was built for."""
        built = llama_cpp.llama_print_system_info().decode().split(" | ")
        return {"version": llama_cpp.__version__, "built_for": [part for part in built if part.endswith("= 1")]}

    def run(self, requests: list[dict[str, Any]], measure: str) -> Timeline:
        """Serve all requests; the first `MOST_STREAMS` at once."""
        del measure
        self._make_context(requests)
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, True)
        submitted = first = time.perf_counter()
        shared = self._share(memory, requests)
        waiting = requests[::-1]
        running: dict[int, Stream] = {}
        idle = list(range(min(len(requests), MOST_STREAMS)))[::-1]
        tokens = 0
        while waiting or running:
            while waiting and idle:
                running[idle.pop()] = Stream(waiting.pop(), shared)
            rows, started = self._step(running)
            for slot, token in rows.items():
                stream = running[slot]
                tokens += 1
                stream.left -= 1
                stream.pending = [token]
                if stream.left == 0:
                    del running[slot]
                    idle.append(slot)
                    llama_cpp.llama_memory_seq_rm(memory, slot, shared, -1)
            if started:
                first = time.perf_counter()
        return Timeline(submitted, first, time.perf_counter(), tokens)

    def _step(self, running: dict[int, Stream]) -> tuple[dict[int, int], bool]:
        """Compute a batch; returns the token of each stream that got one, and whether one of them is its first."""
        self.batch.used = 0
        rows: dict[int, int] = {}
        started = False
        # Streams with one token first: running ones are not held up by prompts. By slot, as the library splits a batch
        # wherever the next token is not of the next slot.
        for slot, stream in sorted(running.items(), key=lambda each: (len(each[1].pending) > 1, each[0])):
            part = stream.pending[: BATCH - self.batch.used]
            if not part:
                break
            last = len(part) == len(stream.pending)
            row = self.batch.add(part, stream.computed, slot, wanted=last)
            if last:
                rows[slot] = row
                started = started or stream.computed < len(stream.prompt)
            stream.computed += len(part)
            stream.pending = stream.pending[len(part) :]
        self._decode()
        return {slot: self._likeliest(row) for slot, row in rows.items()}, started

    def _decode(self) -> None:
        self.batch.native.n_tokens = self.batch.used
        status = llama_cpp.llama_decode(self.context, self.batch.native)
        if status != 0:
            raise RuntimeError(f"llama_decode: found status {status}, expected 0")
        llama_cpp.llama_synchronize(self.context)

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.vocabulary,))))

    def _share(self, memory: Any, requests: list[dict[str, Any]]) -> int:
        """Compute once what all requests begin with, and copy it to each stream; returns its length."""
        prompts = [each["prompt_token_ids"] for each in requests]
        length = _common(prompts)
        for start in range(0, length, BATCH):
            self.batch.used = 0
            self.batch.add(prompts[0][start : min(start + BATCH, length)], start, 0, wanted=False)
            self._decode()
        for slot in range(1, min(len(prompts), MOST_STREAMS)):
            llama_cpp.llama_memory_seq_cp(memory, 0, slot, -1, -1)
        return length

    def _make_context(self, requests: list[dict[str, Any]]) -> None:
        """A context with a stream for each request and room for the longest, unless the last run left such a one."""
        streams = min(len(requests), MOST_STREAMS)
        longest = max(len(each["prompt_token_ids"]) + each["max_tokens"] for each in requests)
        # With one cache for all, streams share the cells of a common prefix; else each is faster with its own.
        unified = _common([each["prompt_token_ids"] for each in requests]) > 0
        shape = (streams, -(-longest // 256) * 256, unified)
        if shape == self.shape:
            return
        if self.context:
            llama_cpp.llama_free(self.context)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = streams
        params.n_ctx = streams * shape[1]
        params.n_batch = BATCH
        params.kv_unified = unified
        params.n_threads = params.n_threads_batch = self.threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {streams} streams of {shape[1]} tokens")
        self.shape = shape


def _common(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with; 0 for one prompt, or where it would not pay."""
    most = min(map(len, prompts)) - 1
    length = next((at for at in range(most) if len({prompt[at] for prompt in prompts}) > 1), most)
    return length if len(prompts) > 1 and length >= LEAST_SHARED else 0


if __name__ == "__main__":
    serve(LlamaCpp)
