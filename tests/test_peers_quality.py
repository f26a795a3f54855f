"""How far an engine is from the float32 run: the arithmetic, and the verdict."""

from math import log, sqrt
from pathlib import Path

import numpy as np
import pytest
from benches.peers.__main__ import main
from benches.peers.engine import EngineError
from benches.peers.quality import REFERENCE, SETTINGS, Line, Positions, mean_and_error, table
from numpy.typing import NDArray

DEFAULT = next(setting for setting in SETTINGS if setting.title == "default")
HALVES, QUARTERS, SURE = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.998, 0.001, 0.001]


def rows(*distributions: list[float], shift: float = 0.0) -> NDArray[np.float32]:
    return np.array(np.log(distributions) + shift, dtype=np.float32)


def test_the_divergence_of_known_distributions_is_that_of_the_arithmetic_by_hand() -> None:
    # Logits and log-probabilities differ by a number for the row.
    found = Positions.of(rows(HALVES, HALVES, SURE, shift=30.0), rows(QUARTERS, HALVES, HALVES), [2, 0, 0])
    sure = 0.998 * log(0.998 / 0.5) + 0.002 * log(0.001 / 0.25)
    # 0.5 log 2 + 0.25 log 1 + 0.25 log 1/2
    assert found.divergence.tolist() == pytest.approx([0.25 * log(2), 0.0, sure], abs=1e-6)
    assert found.loss.tolist() == pytest.approx([log(2), log(2), log(2)], abs=1e-6)
    assert found.reference_loss.tolist() == pytest.approx([log(4), log(2), -log(0.998)], abs=1e-6)
    assert found.same_top.tolist() == [False, True, True]


def test_positions_are_the_same_however_many_are_held_at_once() -> None:
    drawn = np.random.default_rng(5)
    reference, engine = drawn.normal(size=(2, 300, 7)).astype(np.float32)
    following = drawn.integers(7, size=300).tolist()
    whole = Positions.of(reference, engine, following)
    for at in (0, 127, 128, 299):
        one = Positions.of(reference[at : at + 1], engine[at : at + 1], following[at : at + 1])
        assert (one.divergence[0], one.loss[0]) == (whole.divergence[at], whole.loss[at])
    assert (whole.divergence > 0).all()


def test_the_standard_error_is_that_of_a_mean() -> None:
    assert mean_and_error(np.array([1.0, 2.0, 3.0, 6.0])) == pytest.approx((3.0, sqrt(14 / 3 / 4)))


def test_rows_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(EngineError, match=r"rows: found \(1, 3\) beside \(2, 3\) of the reference, expected 2 each"):
        Positions.of(rows(HALVES, HALVES), rows(HALVES), [0, 0])
    broken = rows(HALVES)
    broken[0, 1] = np.nan
    with pytest.raises(EngineError, match="logits: found 1 that are not finite, expected none"):
        Positions.of(rows(HALVES), broken, [0])


def test_an_engine_that_is_the_reference_holds_every_limit() -> None:
    same = Positions.of(rows(HALVES, SURE), rows(HALVES, SURE), [0, 1])
    assert Line("Q4_1", DEFAULT, same, against=same).missed() == []
    assert all(setting.beside in {each.title for each in SETTINGS} for setting in SETTINGS if setting.beside)


def test_what_is_worse_than_llama_cpp_or_a_limit_is_said() -> None:
    close = Positions.of(rows(HALVES, HALVES), rows([0.49, 0.26, 0.25], HALVES), [0, 1])
    far = Positions.of(rows(HALVES, HALVES), rows(QUARTERS, HALVES), [0, 1])
    assert [reason.partition(": found")[0] for reason in Line("Q4_1", DEFAULT, far, against=close).missed()] == [
        "Q4_1: octavo, default: mean KL",
        "Q4_1: octavo, default: perplexity",
        "Q4_1: octavo, default: other top-1",
        "Q4_1: octavo, default: mean KL beside llama.cpp, f16 cache",
    ]
    # Of others nothing is expected.
    assert Line("Q4_1", SETTINGS[0], far).missed() == []


def test_the_table_tells_means_with_their_errors() -> None:
    exact = Positions.of(rows(HALVES, HALVES), rows(HALVES, HALVES), [0, 0])
    far = Positions.of(rows(HALVES, HALVES), rows(QUARTERS, HALVES), [0, 0])
    _, _, first, second = table([Line("Q4_0", REFERENCE, exact), Line("Q4_0", DEFAULT, far, against=exact)])
    assert [cell.strip() for cell in first.split("|")[1:-1]] == [
        "Q4_0", "transformers, float32", "0", "-", "0", "2.000", "-", "100.0%",
    ]  # fmt: skip
    half = 0.125 * log(2)
    assert [cell.strip() for cell in second.split("|")[1:-1]] == [
        "Q4_0",
        "octavo, default",
        f"{half:.5f} ± {half:.5f}",
        f"+{half:.5f} ± {half:.5f}",
        f"{2 * half * 0.999:.4f}",
        # The losses are log 4 and log 2.
        f"{sqrt(8):.3f}",
        "+41.42% ± 34.66%",
        "50.0%",
    ]


def test_without_the_engines_there_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", "--model", "m", "--environments", str(tmp_path)]) == 1
    assert f"llama.cpp: not installed in {tmp_path}: run `install llama.cpp`" in capsys.readouterr().err
