"""A program of an installation, watched while it runs: pip is silent for minutes, what it builds for longer."""

import os
import re
import selectors
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final

from benchctl.untrusted.text import visible_line

Progress = Callable[[str], None]
"""Called about once a second, with what is being done."""

_TICK_S: Final = 1.0
_KEPT_LINES: Final = 40
_READ_BYTES: Final = 1 << 16
_LINE_CHARS: Final = 200
_PHASE: Final = re.compile(
    r"\s*((?:Collecting|Downloading|Using cached|Building|Installing|Preparing|Getting|Attempting|Uninstalling|"
    r"Found existing|Successfully) .*)"
)
"""What pip says that it does; the rest is detail."""


class ProgramError(Exception):
    """A program ended with a failure; ``tail`` are the last lines that it wrote."""

    def __init__(self, tail: str) -> None:
        super().__init__(tail)
        self.tail = tail


def run_watched(argv: Sequence[str], env: Mapping[str, str], phase: str, on_progress: Progress) -> None:
    """Run a program to its end; ``phase`` is what it does, until it says more as pip does.

    Raises ProgramError where it fails, OSError where it cannot be started. An error or an interrupt ends it.
    """
    unbuffered = {**env, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(argv, env=unbuffered, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None  # noqa: S101 - for the type checker
        try:
            tail = _watch(process.stdout, phase, on_progress)
            returncode = process.wait()
        except BaseException:
            process.kill()
            raise
    if returncode:
        raise ProgramError("\n".join(tail))


def _watch(output: IO[bytes], phase: str, on_progress: Progress) -> deque[str]:
    """The last lines of what is written until the end."""
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    begun = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        on_progress(phase)
        while True:
            if selector.select(_TICK_S):
                data = os.read(output.fileno(), _READ_BYTES)
                if not data:
                    break
                *lines, begun = (begun + data).replace(b"\r", b"\n").split(b"\n")
                texts = [line.decode(errors="replace").rstrip() for line in lines if line.strip()]
                tail.extend(texts)
                phase = next((each for text in reversed(texts) if (each := _phase_of(text))), phase)
            on_progress(phase)
    if begun.strip():
        tail.append(begun.decode(errors="replace").rstrip())
    return tail


def _phase_of(line: str) -> str | None:
    match = _PHASE.fullmatch(line)
    return None if match is None else visible_line(match[1], _LINE_CHARS)
