"""Whether draws follow the distribution that the parameters describe.

For vocabularies of several sizes and every combination of filters, many draws are counted and compared with the exact
filtered distribution by Pearson's chi-square test; and each series of draws is made again, by the CPU's sampler and by
the reference's, which has to give the same tokens. The distribution is computed here, in plain Python, and not by what
draws.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

VOCABULARIES = (8, 64, 300, 1000)
DRAWS = 200_000
LEAST_P = 0.001
"""Of true draws, one series in a thousand has a p-value below this."""

# One in so many draws is made by the reference's sampler too.
_PLAIN_SHARE = 20

# Bins in which fewer draws are expected are counted together.
_LEAST_EXPECTED = 10.0


@dataclass(frozen=True, kw_only=True)
class Filters:
    """What decides which tokens stay."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float

    def __str__(self) -> str:
        return f"temperature {self.temperature:<4g} min_p {self.min_p:<5g} top_k {self.top_k:<3} top_p {self.top_p:<4g}"


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How one series of draws compares with its distribution."""

    vocab_size: int
    filters: Filters
    tokens_kept: int
    chi_square: float
    degrees_of_freedom: int
    p_value: float
    strays: int
    """Draws of tokens that the filters drop."""
    repeats: bool
    """Whether the same seed gave the same tokens again, and the reference's slow sampler the first of them."""

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it."""
        return self.p_value > LEAST_P and self.strays == 0 and self.repeats


def measure(
    *,
    draws: int = DRAWS,
    vocabularies: Sequence[int] = VOCABULARIES,
    report: Callable[[Agreement], None] = lambda _: None,
) -> list[Agreement]:
    """Compare every vocabulary under every combination of filters, with `draws` draws each."""
    found = []
    for number, (vocab_size, filters) in enumerate(_cases(vocabularies)):
        found.append(_agreement(vocab_size, filters, draws=draws, seed=number + 1))
        report(found[-1])
    return found


def _cases(vocabularies: Sequence[int]) -> Iterator[tuple[int, Filters]]:
    for vocab_size, min_p, share, top_p in product(vocabularies, (0.0, 0.02), (0.0, 0.4), (1.0, 0.8)):
        for temperature in (0.7, 1.5):
            yield (
                vocab_size,
                Filters(temperature=temperature, min_p=min_p, top_k=int(share * vocab_size), top_p=top_p),
            )


def _agreement(vocab_size: int, filters: Filters, *, draws: int, seed: int) -> Agreement:
    logits = _logits(vocab_size, seed)
    expected = expected_probabilities(logits, filters)
    drawn = _draw(logits, filters, draws, seed)
    counts = Counter(drawn)
    strays = sum(count for token, count in counts.items() if token not in expected)
    chi_square, degrees = _chi_square(counts, expected, draws)
    return Agreement(
        vocab_size=vocab_size,
        filters=filters,
        tokens_kept=len(expected),
        chi_square=chi_square,
        degrees_of_freedom=degrees,
        p_value=chi_square_tail(chi_square, degrees),
        strays=strays,
        repeats=_draw(logits, filters, draws, seed) == drawn
        and _draw(logits, filters, draws // _PLAIN_SHARE, seed, device="reference") == drawn[: draws // _PLAIN_SHARE],
    )


def _draw(logits: Sequence[float], filters: Filters, draws: int, seed: int, *, device: str = "cpu") -> list[int]:
    from octavo._octavo import draw_many

    return draw_many(
        list(logits),
        {
            "temperature": filters.temperature,
            "top_k": filters.top_k,
            "top_p": filters.top_p,
            "min_p": filters.min_p,
            "seed": seed,
            "count": draws,
        },
        device=device,
    )


def _logits(vocab_size: int, seed: int) -> list[float]:
    """A long tail, as models have; sixteenths, which both sides hold exactly, and some of which are equal."""
    random = Random(seed)
    return [round(16 * random.gauss(0.0, 2.0)) / 16 for _ in range(vocab_size)]


def expected_probabilities(logits: Sequence[float], filters: Filters) -> dict[int, float]:
    """The distribution after temperature, min_p, top_k and top_p, by id; equal logits are ordered by id."""
    most = max(logits)
    weights = {token: math.exp((logit - most) / filters.temperature) for token, logit in enumerate(logits)}
    kept = [token for token, weight in weights.items() if weight >= filters.min_p]
    kept.sort(key=lambda token: (-logits[token], token))
    if filters.top_k:
        kept = kept[: filters.top_k]
    if filters.top_p < 1.0:
        wanted, reached = filters.top_p * math.fsum(weights[token] for token in kept), 0.0
        for place, token in enumerate(kept, 1):
            reached += weights[token]
            if reached >= wanted:
                kept = kept[:place]
                break
    total = math.fsum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def _chi_square(counts: Counter[int], expected: dict[int, float], draws: int) -> tuple[float, int]:
    """The statistic and its degrees of freedom."""
    rare_found, rare_expected = 0, 0.0
    bins = []
    for token, probability in expected.items():
        if probability * draws < _LEAST_EXPECTED:
            rare_found += counts[token]
            rare_expected += probability * draws
        else:
            bins.append((counts[token], probability * draws))
    if rare_expected > 0:
        bins.append((rare_found, rare_expected))
    return math.fsum((found - wanted) ** 2 / wanted for found, wanted in bins), len(bins) - 1


def chi_square_tail(chi_square: float, degrees_of_freedom: int) -> float:
    """The probability that a chi-square variate is larger: the regularised upper incomplete gamma function.

    By its power series below the peak and by its continued fraction above it (Abramowitz and Stegun, 6.5.29, 6.5.31).
    """
    shape, at = degrees_of_freedom / 2, chi_square / 2
    if degrees_of_freedom == 0 or at <= 0:
        return 1.0
    front = math.exp(shape * math.log(at) - at - math.lgamma(shape))
    if at < shape + 1:
        term = total = 1 / shape
        for step in range(1, 10_000):
            term *= at / (shape + step)
            total += term
            if term < total * 1e-15:
                break
        return 1 - front * total
    # Lentz's evaluation of 1 / (x + 1 - a - 1 (1 - a) / (x + 3 - a - ...)).
    last = at + 1 - shape
    ratio, fraction = 1e300, 1 / last
    total = fraction
    for step in range(1, 10_000):
        numerator = -step * (step - shape)
        last += 2
        fraction = 1 / (numerator * fraction + last)
        ratio = last + numerator / ratio
        total *= fraction * ratio
        if abs(fraction * ratio - 1) < 1e-15:
            break
    return front * total
