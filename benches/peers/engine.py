"""An engine in a process of its own, which stands still while it is not its turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType


class EngineError(Exception):
    """An engine ended, or answered that it failed."""


class Unsupported(Exception):
    """An engine answered that it cannot do what a case asks."""


class Engine:
    """A worker, which leads a session of its own and is stopped by signal between its turns.

    Stopped, it cannot take time from others: threads of OpenMP that spin, or a poll, stop with it.
    """

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        """Start it; `ready` waits until its model is loaded."""
        self.name = name
        self.started = time.monotonic()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Engine:
        """Use it in `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.close()

    @property
    def session(self) -> int:
        """The id of its session, which is that of its process."""
        return self._process.pid

    def ready(self) -> dict[str, Any]:
        """Wait until the model is loaded; what the engine says of itself."""
        facts = self._read()
        if facts.pop("ready", None) is not True:
            raise EngineError(f"{self.name}: found {facts}, expected that it is ready")
        return facts

    def send(self, request: dict[str, Any]) -> None:
        """Hand it a request."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except BrokenPipeError:
            raise EngineError(self._ended()) from None

    def answer(self) -> dict[str, Any]:
        """Wait for the reply to a request."""
        reply = self._read()
        if "unsupported" in reply:
            raise Unsupported(f"{self.name}: {reply['unsupported']}")
        if "error" in reply:
            raise EngineError(f"{self.name}: {reply['error']}")
        return reply

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """A request and its reply, while the process runs; it is stopped before and after."""
        self.go_on()
        try:
            self.send(request)
            return self.answer()
        finally:
            self.stop()

    def stop(self) -> None:
        """Stand still; one that has ended does."""
        with suppress(ProcessLookupError):
            os.killpg(self.session, signal.SIGSTOP)

    def go_on(self) -> None:
        """Run again."""
        os.killpg(self.session, signal.SIGCONT)

    def peak_bytes(self) -> int:
        """The most memory that was resident at once in its first process."""
        text = Path(f"/proc/{self.session}/status").read_text(encoding="utf-8")
        [line] = [line for line in text.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def close(self) -> None:
        """End it and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.session, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(self._ended())
        found: dict[str, Any] = json.loads(line)
        return found

    def _ended(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-3:]
        return f"{self.name} ended with status {status}: {' | '.join(last)[-600:]}"
