"""JSON schemas of many kinds, and a validator that knows nothing of octavo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonschema.validators import Draft202012Validator, validator_for

from octavo import LLM, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DATA = Path(__file__).parent / "data"
SCHEMAS: dict[str, dict[str, Any]] = json.loads((DATA / "structured_schemas.json").read_text(encoding="utf-8"))


def follows(text: str, schema: object) -> bool:
    """Whether a text is JSON and follows a schema, formats included."""
    kind = validator_for(schema, default=Draft202012Validator)
    return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(json.loads(text)))


def texts_of_schemas() -> Iterator[tuple[str, list[str], list[str]]]:
    """Schemas, each with texts that an output may be, and texts that it may not be."""
    found: list[tuple[str, list[str], list[str]]] = []
    for line in (DATA / "schemas.txt").read_text(encoding="utf-8").splitlines():
        sign, _, text = line.partition(" ")
        text = json.loads(text[len("string ") :]) if text.startswith("string ") else text
        if sign in {"+", "-"}:
            _, right, wrong = found[-1]
            (right if sign == "+" else wrong).append(text)
        elif line and not line.startswith("#"):
            found.append((line, [], []))
    yield from found


def share_that_stops(llm: LLM, schema: Mapping[str, Any], seeds: int) -> float:
    """The share of hot outputs that end by themselves; each of those follows the schema."""
    form = StructuredOutputsParams(json=schema)
    params = [
        SamplingParams(temperature=1.5, max_tokens=256, seed=seed, structured_outputs=form) for seed in range(seeds)
    ]
    outputs = llm.generate(["Some JSON:\n"] * seeds, params, use_tqdm=False)
    ended = [output.outputs[0] for output in outputs if output.outputs[0].finish_reason == "stop"]
    wrong = [completion.text for completion in ended if not follows(completion.text, schema)]
    assert wrong == []
    return len(ended) / seeds
