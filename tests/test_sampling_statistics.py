"""Draws follow the distribution that the parameters describe: what `octavo bench sampling` measures."""

import math

import pytest

from octavo.bench.sampling import DRAWS, LEAST_P, Filters, chi_square_tail, expected_probabilities, measure

PLAIN = Filters(temperature=1.0, min_p=0.0, top_k=0, top_p=1.0)


def test_every_combination_of_filters_is_drawn_from_as_described_and_repeats() -> None:
    found = measure()
    assert DRAWS == 200_000
    assert {agreement.vocab_size for agreement in found} == {8, 64, 300, 1000}
    combinations = {(one.filters.min_p > 0, one.filters.top_k > 0, one.filters.top_p < 1) for one in found}
    assert len(combinations) == 8
    assert [agreement for agreement in found if not agreement.holds] == []


def test_draws_at_another_temperature_are_seen_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = expected_probabilities

    def a_little_warmer(logits: list[float], filters: Filters) -> dict[int, float]:
        return exact([logit / 1.02 for logit in logits], filters)

    monkeypatch.setattr("octavo.bench.sampling.expected_probabilities", a_little_warmer)
    agreements = measure(vocabularies=[8, 64])
    assert sum(agreement.p_value < LEAST_P for agreement in agreements) > len(agreements) / 2


# Critical values as statistical tables print them.
@pytest.mark.parametrize(
    ("chi_square", "degrees", "p_value"),
    [(3.841, 1, 0.05), (16.266, 3, 0.001), (124.342, 100, 0.05), (77.929, 100, 0.95), (1143.917, 1000, 0.001)],
)
def test_the_tail_of_chi_square_is_what_tables_say(chi_square: float, degrees: int, p_value: float) -> None:
    assert chi_square_tail(chi_square, degrees) == pytest.approx(p_value, rel=2e-3)


def test_filters_leave_the_sets_that_they_name() -> None:
    logits = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
    kept = {
        "all": expected_probabilities(logits, PLAIN),
        "min_p": expected_probabilities(logits, Filters(temperature=1.0, min_p=0.6, top_k=0, top_p=1.0)),
        "top_k": expected_probabilities(logits, Filters(temperature=1.0, min_p=0.0, top_k=3, top_p=1.0)),
        "top_k, top_p": expected_probabilities(logits, Filters(temperature=1.0, min_p=0.0, top_k=2, top_p=0.55)),
    }
    assert {name: list(found) for name, found in kept.items()} == {
        "all": [0, 1, 2, 3],
        "min_p": [0, 1],
        "top_k": [0, 1, 2],
        "top_k, top_p": [0],
    }
    assert kept["min_p"][0] == pytest.approx(4 / 7)
