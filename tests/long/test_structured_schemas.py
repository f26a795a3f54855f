"""Hot outputs of a real model under schemas of many kinds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM
from structured import SCHEMAS, share_that_stops

SEEDS = 500


@pytest.fixture(scope="module")
def wide(smollm2_file: Path) -> Iterator[LLM]:
    """With room for all that run at once."""
    with LLM(smollm2_file, max_model_len=512, max_num_seqs=64, num_kv_blocks=1400) as llm:
        yield llm


@pytest.mark.parametrize("name", SCHEMAS)
def test_most_hot_outputs_end_by_themselves_and_all_that_do_follow_the_schema(wide: LLM, name: str) -> None:
    share = share_that_stops(wide, SCHEMAS[name], SEEDS)
    print(f"{name}: {share:.1%} of {SEEDS} outputs end with stop")
    assert share >= 0.8
