"""The table of what must not change a request's tokens; each entry says how a test knows that it was there.

An entry added here is run with every other one, and stands in the page.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from law_runs import CPU, SMOLLM2, SUBJECTS, Ask, Options, Params, Run, Subject, blocking, concurrent
from octavo import SamplingParams, StructuredOutputsParams


def _nothing(*_: object) -> dict[str, Any]:
    return {}


def _nobody(_: Subject) -> list[list[Ask]]:
    return []


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row and a column of the matrix."""

    name: str
    does: str
    seen: str
    """What `happened` looks for, in words."""
    happened: Callable[[Run], bool]
    options: Callable[[Subject, int], Options] = _nothing
    """Options of the engine, from the number of continuations of each request."""
    params: Callable[[Subject, int], Params] = _nothing
    """What the request for the subject's prompt at this index asks for."""
    before: Callable[[Subject], list[list[Ask]]] = _nobody
    """Batches that the same engine has served before."""
    order: Callable[[int], list[int]] | None = None
    """The order in which that many requests are handed in."""
    together: bool = False
    """Whether all requests are handed in at once, and not one after the other."""
    changes_logits: bool = False
    """Whether a token's log-probability is another one than the model's own."""
    face: Callable[[Path, Options], Any] = blocking
    subjects: tuple[Subject, ...] = SUBJECTS


def _overlap(run: Run) -> bool:
    stories = [output.metrics for output in run.outputs if output.metrics is not None]
    spans = [(story.scheduled_time or 0.0, story.last_token_time or 0.0) for story in stories]
    return any(one[0] <= other[0] < one[1] for one, other in combinations(sorted(spans), 2))


def _fell(run: Run) -> bool:
    """Somewhere a prompt was handed in before one that stands before it in the list."""
    arrivals = [(output.metrics.arrival_time if output.metrics else 0.0) for output in run.outputs]
    indices = [answer.index for answer in run.answers]
    return arrivals == sorted(arrivals) and any(one > other for one, other in pairwise(indices))


def _stories(run: Run, count: str) -> list[int]:
    return [getattr(output.metrics, count) for output in run.outputs]


def _served_before(subject: Subject) -> list[list[Ask]]:
    """Every other prompt as it is, of the rest the first half, with an end of its own; the first prompts come last."""
    params = SamplingParams(temperature=0, max_tokens=1)
    halves = [[*prompt[: len(prompt) // 2], 1, 2, 3] for prompt in subject.prompts]
    prompts = [whole if at % 2 else half for at, (whole, half) in enumerate(zip(subject.prompts, halves, strict=True))]
    return [[Ask(prompt, params)] for prompt in reversed(prompts)]


def _short_ones(_: Subject) -> list[list[Ask]]:
    """After many short outputs the scheduler expects short ones, and lets in more than can stay."""
    return [[Ask([1], SamplingParams(temperature=0, max_tokens=1))] * 256]


# One entry for each way to filter, a mix of all, and a greedy neighbour.
_MIXES: list[Params] = [
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.3, "top_k": 20, "seed": 2},
    {"temperature": 1.0, "top_p": 0.8, "seed": 3},
    {"temperature": 0.9, "min_p": 0.05, "seed": 4},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "seed": 2**64 - 1},
    {"temperature": 0.0},
]


# The regular expressions of structured output need letters and spaces; bytes are the tiny model's first tokens.
_ALLOWED = range(30, 460)
_STOPS = list("etaoinsh")
_WORDS = re.compile(r"([a-z]{2,7} )+")


def _masks(_: Subject, index: int) -> Params:
    bias = {100 + index: 4.0, 40: -100.0}
    return {"allowed_token_ids": _ALLOWED, "logit_bias": bias, "bad_words": ["ab", "q"], "min_tokens": 5}


def _kept_to_masks(run: Run) -> bool:
    return all(token in _ALLOWED for completion in run.completions for token in completion.token_ids)


# A penalty below 0 is a reward, and soon there is nothing but the one token.
_PENALTIES: list[Params] = [
    {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
]


def _repeated(run: Run) -> bool:
    outputs = [completion.token_ids for completion in run.completions if len(completion.token_ids) >= 12]
    return any(Counter(ids).most_common(1)[0][1] >= len(ids) / 3 for ids in outputs)


def _spelled_words(run: Run) -> bool:
    # The last word need not have come to its end.
    texts = [completion.text for completion in run.completions]
    return all(_WORDS.fullmatch(text[: text.rfind(" ") + 1]) or len(text) < 8 for text in texts) and any(
        len(text) > 8 for text in texts
    )


def _threads(count: int) -> Feature:
    return Feature(
        name=f"{count} thread" + "s" * (count > 1),
        does=f"The engine computes with `threads={count}`.",
        seen="the engine reports as many",
        happened=lambda run: run.threads == count,
        options=lambda *_: {"threads": count},
        subjects=(CPU, SMOLLM2),
    )


FEATURES = (
    Feature(
        name="batched",
        does="All requests are handed in at once.",
        seen="one was scheduled before another had its last token",
        happened=_overlap,
        order=lambda count: list(range(count)),
        together=True,
    ),
    Feature(
        name="reversed",
        does="All requests are handed in at once, the last one first.",
        seen="a later prompt arrived before an earlier one",
        happened=_fell,
        order=lambda count: list(reversed(range(count))),
        together=True,
    ),
    Feature(
        name="chunked",
        does="A step computes fewer tokens than most prompts have.",
        seen="a prompt was computed in more than one chunk",
        happened=lambda run: any(
            chunks > 1 and preemptions == 0
            for chunks, preemptions in zip(_stories(run, "chunks"), _stories(run, "preemptions"), strict=True)
        ),
        options=lambda subject, _: {"max_num_batched_tokens": subject.step_tokens},
    ),
    Feature(
        name="prefix-hit",
        does="The prefix cache is on, and prompts that begin alike were served before.",
        seen="`num_cached_tokens` is above 0",
        happened=lambda run: any(output.num_cached_tokens > 0 for output in run.outputs),
        options=lambda *_: {"enable_prefix_caching": True},
        before=_served_before,
    ),
    Feature(
        name="preempted",
        does="The KV pool holds the largest request, or two that begin, and outputs are longer than any before.",
        seen="a request lost its blocks",
        happened=lambda run: sum(_stories(run, "preemptions")) > 0,
        options=lambda subject, choices: {"num_kv_blocks": subject.scarce_blocks(choices)},
        params=lambda subject, index: {"max_tokens": subject.long_tokens + index},
        before=_short_ones,
        together=True,
    ),
    Feature(
        name="n>1",
        does="Each request asks for 3 continuations, drawn at temperature 1.",
        seen="there are 3, and they differ",
        happened=lambda run: (
            all(len(output.outputs) == 3 for output in run.outputs)
            and any(output.outputs[0].token_ids != output.outputs[2].token_ids for output in run.outputs)
        ),
        params=lambda _, index: {"n": 3, "temperature": 1.0, "seed": 40 + index},
    ),
    Feature(
        name="logprobs",
        does="Each request asks for the 5 likeliest tokens.",
        seen="each token comes with 5 or more",
        happened=lambda run: all(
            len(row) >= 5 for completion in run.completions for row in completion.logprobs or [{}]
        ),
        params=lambda *_: {"logprobs": 5},
    ),
    Feature(
        name="prompt logprobs",
        does="Each request asks for the 2 likeliest tokens at each place of its prompt.",
        seen="each token of a prompt but the first comes with 2 or more",
        happened=lambda run: all(
            [len(row or ()) for row in output.prompt_logprobs or []][1:] >= [2] * (len(output.prompt_token_ids) - 1)
            for output in run.outputs
        ),
        params=lambda *_: {"prompt_logprobs": 2},
    ),
    Feature(
        name="seeded sampling",
        does="Requests have seeds, temperatures, `top_k`, `top_p` and `min_p` of their own; one in six is greedy.",
        seen="a token was drawn that is not the likeliest",
        happened=lambda run: any(
            (logprob.rank or 1) > 1
            for completion in run.completions
            for token, row in zip(completion.token_ids, completion.logprobs or [], strict=True)
            for logprob in [row[token]]
        ),
        params=lambda _, index: _MIXES[index % len(_MIXES)],
    ),
    Feature(
        name="penalties",
        does="Requests have `repetition_penalty`, `presence_penalty` and `frequency_penalty`; every other one rewards "
        "repetition.",
        seen="a token makes up a third of an output",
        happened=_repeated,
        params=lambda _, index: _PENALTIES[index % len(_PENALTIES)],
        changes_logits=True,
    ),
    Feature(
        name="masks",
        does="Requests have `allowed_token_ids`, `logit_bias`, `bad_words` and `min_tokens`.",
        seen="every token is an allowed one",
        happened=_kept_to_masks,
        params=_masks,
        changes_logits=True,
    ),
    Feature(
        name="stop strings",
        does="Every other request has stop strings, which count from the fifth token on.",
        seen="a `stop_reason` is a text",
        happened=lambda run: any(isinstance(completion.stop_reason, str) for completion in run.completions),
        params=lambda _, index: {"stop": _STOPS if index % 2 else None, "min_tokens": 5},
    ),
    Feature(
        name="structured output",
        does="Outputs are words of two to seven letters, by a regular expression.",
        seen="they are",
        happened=_spelled_words,
        params=lambda *_: {"structured_outputs": StructuredOutputsParams(regex=_WORDS.pattern)},
        changes_logits=True,
    ),
    Feature(
        name="beam search",
        does="Each request is a search with 3 beams.",
        seen="there are 3 sequences, another one first than last, and the best has the largest sum",
        happened=lambda run: all(
            len(output.outputs) == 3
            and output.outputs[0].token_ids != output.outputs[2].token_ids
            and (output.outputs[0].cumulative_logprob or 0) >= (output.outputs[2].cumulative_logprob or 0)
            for output in run.outputs
        ),
        params=lambda *_: {"beam_width": 3},
    ),
    _threads(1),
    _threads(2),
    Feature(
        name="AsyncLLM",
        does="Each request is a task of its own on an event loop.",
        seen="each answer bears the name that its task gave it",
        happened=lambda run: all(output.request_id.startswith("task ") for output in run.outputs),
        together=True,
        face=concurrent,
    ),
)

REFUSED: Mapping[frozenset[str], str] = {
    frozenset({"1 thread", "2 threads"}): "an engine has one number of threads",
    frozenset({"prefix-hit", "prompt logprobs"}): "a prompt that is reported on is computed whole",
} | {
    frozenset({"beam search", other}): "a search draws nothing, and has no sampling parameters"
    for other in (
        "n>1",
        "logprobs",
        "prompt logprobs",
        "seeded sampling",
        "penalties",
        "masks",
        "stop strings",
        "structured output",
    )
}
"""Pairs that cannot be, and why."""
