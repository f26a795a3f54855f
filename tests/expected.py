"""What sampling parameters do to logits, and what a beam search finds, in plain numpy."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import reference
from octavo import SamplingParams

Array = NDArray[np.float64]


def ruled(row: Array, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Array:
    """The logits after bias, the mask of allowed tokens, and penalties, before the token that follows `output`."""
    row = row.copy()
    for token, bias in (params.logit_bias or {}).items():
        row[int(token)] += bias
    if params.allowed_token_ids is not None:
        forbidden = np.ones(len(row), bool)
        forbidden[list(params.allowed_token_ids)] = False
        row[forbidden] = -np.inf
    seen = sorted({*prompt, *output})
    row[seen] = np.where(row[seen] > 0, row[seen] / params.repetition_penalty, row[seen] * params.repetition_penalty)
    for token, count in Counter(output).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    return row


@dataclass(frozen=True)
class Sequenced:
    """A sequence of a beam search."""

    tokens: tuple[int, ...]
    logprob: float


def beam_search(
    logits_after: Callable[[Sequence[int]], Array],
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    end_tokens: Sequence[int] = (),
) -> list[Sequenced]:
    """As the definition reads: every beam goes on with its likeliest tokens, twice as many as the beam is wide."""

    def score(sequence: Sequenced) -> float:
        length = len(sequence.tokens) - (sequence.tokens[-1] in end_tokens)
        return sequence.logprob / math.pow(length, length_penalty)

    beams = [Sequenced(tuple(prompt), 0.0)]
    ended: list[Sequenced] = []
    for _ in range(max_tokens):
        longer: list[Sequenced] = []
        for beam in beams:
            logprobs = reference.log_softmax(logits_after(beam.tokens))
            likeliest = np.argsort(-logprobs, kind="stable")[: 2 * width]
            longer += [
                Sequenced((*beam.tokens, int(token)), beam.logprob + float(logprobs[token])) for token in likeliest
            ]
        ended += [sequence for sequence in longer if sequence.tokens[-1] in end_tokens]
        going_on = [sequence for sequence in longer if sequence.tokens[-1] not in end_tokens]
        beams = sorted(going_on, key=score, reverse=True)[:width]
    return sorted([*ended, *beams], key=score, reverse=True)[:width]
