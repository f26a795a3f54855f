"""How far engines are from the float32 run of the same weights, position by position of a text."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from benches.peers.engine import EngineError
from benches.peers.environments import PEERS, python_of, variables
from benches.peers.table import aligned
from benches.peers.weights import written

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

WRITER = Path(__file__).parent / "workers" / "write_logits.py"
HEADINGS = ("weights", "engine", "mean KL", "octavo - llama.cpp", "99.9% KL", "perplexity", "change", "same top-1")
LEAST_SAME_TOP = 0.95
MOST_CHANGE = 0.005
ROWS = 128
"""Positions whose vocabularies are held in float64 at once."""


@dataclass(frozen=True)
class Setting:
    """An engine and what it is loaded with."""

    engine: str
    title: str
    options: dict[str, Any]
    most_divergence: float = float("inf")
    beside: str | None = None
    """The title of llama.cpp's setting that octavo's is measured against."""
    no_worse: bool = True
    """Whether it is promised to be no further from the reference than that one."""


_WHOLE, _BYTES = {"type_k": "F16", "type_v": "F16"}, {"type_k": "Q8_0", "type_v": "Q8_0"}
REFERENCE = Setting("transformers", "float32", {"attn_implementation": "eager"})
SETTINGS = (
    Setting("llama.cpp", "f16 cache", _WHOLE | {"flash_attn": False}),
    Setting("llama.cpp", "f16 cache, flash attention", _WHOLE | {"flash_attn": True}),
    Setting("llama.cpp", "q8_0 cache, flash attention", _BYTES | {"flash_attn": True}),
    Setting("octavo", "default", {}, 5e-3, beside="f16 cache"),
    # A scale for each token and head, where q8_0 has two: smaller, and not promised to be as near.
    Setting(
        "octavo", "int8 cache", {"kv_cache_dtype": "int8"}, 5e-3, beside="q8_0 cache, flash attention", no_worse=False
    ),
    Setting("octavo", "bfloat16", {"dtype": "bfloat16"}, 5e-4, beside="f16 cache"),
)


@dataclass(frozen=True)
class Positions:
    """What an engine's distributions are beside those of the reference, an entry for each position."""

    divergence: Floats
    """The KL divergence of the engine's distribution from the reference's: nats that its predictions cost more."""
    loss: Floats
    """Minus the log-probability of the token that follows in the text."""
    reference_loss: Floats
    same_top: NDArray[np.bool_]

    @staticmethod
    def of(reference: NDArray[Any], engine: NDArray[Any], following: Sequence[int]) -> Positions:
        """From logits, or log-probabilities, of the whole vocabulary: a row for each token of `following`."""
        if not reference.shape == engine.shape == (len(following), reference.shape[-1]):
            raise EngineError(
                f"rows: found {engine.shape} beside {reference.shape} of the reference, expected {len(following)} each"
            )
        parts = []
        for start in range(0, len(following), ROWS):
            rows = slice(start, start + ROWS)
            expected, found = log_softmax(reference[rows]), log_softmax(engine[rows])
            at = (np.arange(len(found)), list(following[rows]))
            divergence = (np.exp(expected) * (expected - found)).sum(axis=1)
            parts.append((divergence, -found[at], -expected[at], expected.argmax(axis=1) == found.argmax(axis=1)))
        return Positions(*map(np.concatenate, zip(*parts, strict=True)))


def log_softmax(rows: NDArray[Any]) -> Floats:
    """Natural log-probabilities, in float64."""
    if not np.isfinite(rows).all():
        raise EngineError(f"logits: found {np.count_nonzero(~np.isfinite(rows))} that are not finite, expected none")
    shifted: Floats = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    normal: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normal


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    weights: str
    setting: Setting
    positions: Positions
    against: Positions | None = None
    """Those of the setting of llama.cpp that this one is measured against."""

    def figures(self) -> dict[str, Any]:
        """All that is told of it; a pair is a mean and its standard error."""
        positions = self.positions
        change, error = mean_and_error(positions.loss - positions.reference_loss)
        against = None if self.against is None else positions.divergence - self.against.divergence
        return {
            "weights": self.weights,
            "engine": self.setting.engine,
            "setting": self.setting.title,
            "options": self.setting.options,
            "positions": len(positions.divergence),
            "divergence": mean_and_error(positions.divergence),
            "against": None if against is None else mean_and_error(against),
            "highest_divergence": float(np.quantile(positions.divergence, 0.999)),
            "perplexity": float(np.exp(positions.loss.mean())),
            "change": (float(np.expm1(change)), error),
            "same_top": float(positions.same_top.mean()),
        }

    def cells(self) -> tuple[str, ...]:
        """What the table says."""
        found = self.figures()
        name = f"{self.setting.engine}, {self.setting.title}"
        exact = self.setting == REFERENCE
        return (
            self.weights,
            name,
            "0" if exact else "{:.5f} ± {:.5f}".format(*found["divergence"]),
            "-" if found["against"] is None else "{:+.5f} ± {:.5f}".format(*found["against"]),
            "0" if exact else f"{found['highest_divergence']:.4f}",
            f"{found['perplexity']:.3f}",
            "-" if exact else "{:+.2%} ± {:.2%}".format(*found["change"]),
            f"{found['same_top']:.1%}",
        )

    def missed(self) -> list[str]:
        """What octavo is to hold and does not."""
        found = self.figures()
        limits = [
            ("mean KL", found["divergence"][0], self.setting.most_divergence, ".5f"),
            ("perplexity", found["change"][0], MOST_CHANGE, "+.2%"),
            ("other top-1", 1 - found["same_top"], 1 - LEAST_SAME_TOP, ".1%"),
        ]
        if self.against is not None and self.setting.no_worse:
            theirs = float(self.against.divergence.mean())
            limits.append((f"mean KL beside llama.cpp, {self.setting.beside}", found["divergence"][0], theirs, ".5f"))
        name = f"{self.weights}: {self.setting.engine}, {self.setting.title}"
        return [
            f"{name}: {what}: found {value:{shape}}, expected at most {most:{shape}}"
            for what, value, most, shape in limits
            if self.setting.engine == "octavo" and value > most
        ]


def mean_and_error(values: Floats) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def table(lines: Sequence[Line]) -> list[str]:
    """Lines in Markdown."""
    return aligned(HEADINGS, [line.cells() for line in lines])


class Quality:
    """Runs engines along the same token ids."""

    def __init__(self, environments: Path, octavo_python: Path, report: Callable[[str], None]) -> None:
        """What is missing is an error: without the reference, or llama.cpp, there is no answer."""
        self.environments = environments
        self.report = report
        self.cpus = sorted(os.sched_getaffinity(0))
        self._started: dict[str, tuple[Path, dict[str, str]]] = {"octavo": (octavo_python, dict(os.environ))}
        for name in ("llama.cpp", "transformers"):
            python = python_of(PEERS[name], environments)
            if python is None:
                raise EngineError(f"{name}: not installed in {environments}: run `install {name}`")
            self._started[name] = (python, variables(PEERS[name], python, self.cpus))

    def sequences(self, model: Path, text: Path, length: int) -> list[list[int]]:
        """The text in pieces of `length` tokens; what is left over is left out."""
        script = (
            "import json, sys; from octavo import LLM; "
            "print(json.dumps(LLM(sys.argv[1]).encode(sys.stdin.read(), add_special_tokens=False)))"
        )
        tokens = json.loads(self._run("octavo", ["-c", script, str(model)], text.read_text(encoding="utf-8")))
        pieces = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
        if not pieces:
            raise EngineError(f"{text}: found {len(tokens)} tokens, expected at least {length}")
        return pieces

    def measure(self, weights: str, model: Path, sequences: list[list[int]]) -> list[Line]:
        """The lines of one file, `weights` made from `model`, each against the float32 run of that very file."""
        file = written(weights, model, self.environments)
        if not file.exists():
            raise EngineError(f"{file}: missing: run `prepare`")
        following = [token for tokens in sequences for token in tokens[1:]]
        with TemporaryDirectory() as folder:
            ids = Path(folder) / "sequences.json"
            ids.write_text(json.dumps(sequences), encoding="utf-8")
            reference = self._logits(REFERENCE, file, ids, Path(folder) / "reference.npy")
            lines = {REFERENCE.title: Line(weights, REFERENCE, Positions.of(reference, reference, following))}
            for setting in SETTINGS:
                self.report(f"{weights}: {setting.engine}, {setting.title}")
                found = self._logits(setting, file, ids, Path(folder) / "engine.npy")
                against = lines[setting.beside].positions if setting.beside else None
                lines[setting.title] = Line(weights, setting, Positions.of(reference, found, following), against)
        return list(lines.values())

    def _logits(self, setting: Setting, model: Path, sequences: Path, output: Path) -> NDArray[np.float32]:
        words = [str(WRITER), "--engine", setting.engine, "--model", str(model), "--threads", str(len(self.cpus))]
        options = ["--options", json.dumps(setting.options), "--sequences", str(sequences), "--output", str(output)]
        self._run(setting.engine, words + options)
        found: NDArray[np.float32] = np.load(output, mmap_mode="r")
        return found

    def _run(self, engine: str, words: list[str], given: str = "") -> str:
        python, environment = self._started[engine]
        done = subprocess.run(
            [str(python), *words], check=False, capture_output=True, text=True, input=given, env=environment
        )
        if done.returncode != 0:
            last = " | ".join(done.stderr.strip().splitlines()[-3:])[-600:]
            raise EngineError(f"{engine} ended with status {done.returncode}: {last}")
        return done.stdout
