"""docs/feature-matrix.md, from the table of features."""

from collections.abc import Sequence

from law import Case
from law_features import FEATURES, REFUSED, Feature
from law_runs import SUBJECTS

PAGE = """\
# Features together

**The law.** A request's tokens depend on the model, the request and its seed, and on nothing else.

Every pair of the features below is run. The token ids and log-probabilities of each request are compared, bit for bit,
with those of the same request in the *plain run*: alone, in steps that hold the whole prompt, with no prefix cache, in
a KV pool that never runs short, on one thread. The test that runs the pairs writes this page when all of them hold:

```
{command}
```

## The matrix

{matrix}

- `equal` with letters: ids and log-probabilities are those of the plain run, on
  {letters}.
  A feature with itself is the feature alone. SmolLM2 runs chosen pairs; Reference computes on one thread.
{notes}
## The features

Each run is checked to have had its features: what is looked for stands on the right.

{features}

A feature is an entry of the table in `tests/law_features.py`. It is run with every other one, and appears here without
further work.
"""
COMMAND = ".venv/bin/python -m pytest tests/test_law.py"


def page(cases: Sequence[Case]) -> str:
    """The page when all `cases` hold."""
    reasons = list(dict.fromkeys(REFUSED.values()))
    return PAGE.format(
        command=COMMAND,
        matrix=_table(["", *(feature.name for feature in FEATURES)], [_row(row, cases, reasons) for row in FEATURES]),
        letters=_listed([f"{subject.name} (`{subject.letter}`)" for subject in SUBJECTS]),
        notes="".join(f"- `refused` [{place}]: {reason}.\n" for place, reason in enumerate(reasons, 1)),
        features=_table(
            ["feature", "what it does", "how the test knows"],
            [[feature.name, feature.does, feature.seen] for feature in FEATURES],
        ),
    )


def _row(row: Feature, cases: Sequence[Case], reasons: Sequence[str]) -> list[str]:
    return [f"**{row.name}**", *(_cell(row, column, cases, reasons) for column in FEATURES)]


def _cell(row: Feature, column: Feature, cases: Sequence[Case], reasons: Sequence[str]) -> str:
    pair = frozenset({row.name, column.name})
    if pair in REFUSED:
        return f"refused [{reasons.index(REFUSED[pair]) + 1}]"
    run = [case for case in cases if frozenset(feature.name for feature in case.features) == pair]
    letters = [subject.letter for subject in SUBJECTS if any(case.subject == subject for case in run)]
    return f"equal {' '.join(letters)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _listed(items: Sequence[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"
