"""`octavo generate MODEL "prompt" ...`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.options import (
    UsageError,
    add_engine_options,
    add_sampling_options,
    load,
    sampling_params,
    sampling_settings,
)
from octavo.errors import OctavoError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence
    from typing import TextIO

    from octavo import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams


NO_TOKEN = "the model gave no finite numbers, or no token was allowed"
"""What the finish reason "error" means."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo generate`."""
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, a Hugging Face folder, or a pulled model's name")
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="a text to continue")
    parser.add_argument("--prompt-token-ids", metavar="FILE", help="JSON: a list of token ids, or a list of such lists")
    parser.add_argument("--json", action="store_true", help="print one object with texts, token ids and timings")
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate and print."""
    prompts = _prompts(arguments)
    settings = sampling_settings(arguments)
    started = time.monotonic()
    with load(arguments) as llm:
        load_s = time.monotonic() - started
        params = sampling_params(llm, settings)
        if arguments.json:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            print(_json_for(sys.stdout, _as_object(llm.served_model_name, outputs, params, load_s)))
            _raise_failures([answer.finish_reason for answer in output.outputs] for output in outputs)
        else:
            _print_as_it_comes(llm, prompts, params)
    return 0


class InOrder:
    """Prints several texts in order: the first unfinished one as it comes, each later one when its turn has come."""

    def __init__(self, count: int, sink: TextIO) -> None:
        self._held = [""] * count
        self._unfinished = set(range(count))
        self._turn = 0
        self._sink = sink

    def add(self, index: int, text: str, *, finished: bool) -> None:
        """Take the next piece of text `index`."""
        self._held[index] += text
        if finished:
            self._unfinished.discard(index)
        while self._turn < len(self._held):
            self._sink.write(self._held[self._turn])
            self._held[self._turn] = ""
            if self._turn in self._unfinished:
                break
            self._sink.write("\n")
            self._turn += 1
        self._sink.flush()


def _prompts(arguments: argparse.Namespace) -> list[Any]:
    prompts: list[Any] = list(arguments.prompts)
    if arguments.prompt_token_ids is not None:
        prompts += [{"prompt_token_ids": ids} for ids in _read_token_ids(Path(arguments.prompt_token_ids))]
    if not prompts:
        raise UsageError("no prompt: give a PROMPT or --prompt-token-ids FILE (see octavo generate --help)")
    return prompts


def _read_token_ids(file: Path) -> list[list[int]]:
    content = file.read_bytes()
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        # Also what is no UTF-8, a number of thousands of digits, and lists in lists without end.
        raise UsageError(f"{file}: found no JSON ({error}), expected a list of token ids") from None
    lists = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
    for ids in lists:
        # JSON's true and 1.0 compare equal to 1 in Python, and are no token ids.
        if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
            excerpt = json.dumps(ids)[:60]
            raise UsageError(f"{file}: found {excerpt}, expected a list of one or more whole numbers")
    return lists


def _print_as_it_comes(llm: LLM, prompts: list[Any], params: SamplingParams) -> None:
    printer = InOrder(len(prompts) * params.n, sys.stdout)
    reasons: list[list[str | None]] = [[None] * params.n for _ in prompts]
    for delta in llm.stream(prompts, params):
        reasons[delta.index][delta.choice] = delta.finish_reason
        printer.add(delta.index * params.n + delta.choice, delta.text, finished=delta.finished)
    _raise_failures(reasons)


def _raise_failures(reasons: Iterable[list[str | None]]) -> None:
    failed = [str(number) for number, each in enumerate(reasons) if "error" in each]
    if failed:
        raise OctavoError(f"no token could be drawn for prompt {', '.join(failed)}: {NO_TOKEN}")


def _json_for(sink: TextIO, found: dict[str, Any]) -> str:
    """JSON that `sink` can encode: as it reads, or else with escapes."""
    text = json.dumps(found, ensure_ascii=False)
    try:
        text.encode(sink.encoding or "ascii")
    except UnicodeEncodeError:
        return json.dumps(found)
    return text


def _as_object(model: str, outputs: Sequence[RequestOutput], params: SamplingParams, load_s: float) -> dict[str, Any]:
    """What `--json` prints. Programs read it: names do not change."""
    from octavo.bench.timings import timings

    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {
        "model": model,
        "outputs": [_answer_as_object(output, answer, params) for output in outputs for answer in output.outputs],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "timings": {"load_s": load_s, **timings(outputs)},
    }


def _answer_as_object(output: RequestOutput, answer: CompletionOutput, params: SamplingParams) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt": output.prompt,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
    }
    if len(output.outputs) > 1:
        found["index"] = answer.index
    if params.stop or params.stop_token_ids:
        found["stop_reason"] = answer.stop_reason
    if answer.logprobs is not None:
        found["logprobs"] = [_numbers(entries) for entries in answer.logprobs]
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = [None if row is None else _numbers(row) for row in output.prompt_logprobs]
    return found


def _numbers(entries: Mapping[int, Logprob]) -> dict[int, float]:
    return {token: entry.logprob for token, entry in entries.items()}
