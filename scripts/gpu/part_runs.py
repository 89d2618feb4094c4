"""Runs the parts one after another, each in a time of its own, and remembers on disk which are done.

A part leaves in ``parts/`` its text, its log, the clocks of the GPU, and, when it has ended, its outcome. Standard
library only.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from parts import ROOT, Command, Part, Setup, missing
from smi import summary, watched

Ending = Literal["done", "failed", "timed out", "skipped", "left out", "interrupted"]
GRACE_S = 10.0
"""From the polite signal to the one that cannot be refused."""
_LOG_LINES = 15


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a part."""

    name: str
    ending: Ending
    seconds: float = 0.0
    reason: str = ""
    key: str = ""
    """Of what: commands, commit and device. A part that was done for another key is run again."""

    @property
    def is_bad(self) -> bool:
        return self.ending in ("failed", "timed out", "left out")


class Parts:
    """The parts of one directory."""

    def __init__(self, setup: Setup, key: str, gpu: str) -> None:
        self._setup, self._key, self._gpu = setup, key, gpu
        self.directory = setup.directory / "parts"
        self.directory.mkdir(parents=True, exist_ok=True)

    def file(self, part: Part, ending: str) -> Path:
        return self.directory / f"{part.name}.{ending}"

    def outcome(self, part: Part) -> Outcome | None:
        """That of an earlier call, if it was for the same key."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            kept = Outcome(**json.loads(self.file(part, "json").read_text(encoding="utf-8")))
            if kept.key == self._key_of(part):
                return kept
        return None

    def run(self, part: Part, seconds_left: float) -> Outcome:
        """Run a part; what is there of an earlier attempt is replaced."""
        self.file(part, "json").unlink(missing_ok=True)
        limit_s = min(part.limit_s, seconds_left - GRACE_S)
        reason = missing(part, self._setup)
        if reason is not None:
            outcome = Outcome(name=part.name, ending="skipped", reason=reason)
        elif limit_s < part.limit_s / 2:
            reason = f"{max(seconds_left, 0):.0f} seconds were left of the whole, and it may need {part.limit_s}"
            outcome = Outcome(name=part.name, ending="left out", reason=reason)
        else:
            outcome = self._measured(part, limit_s)
        content = json.dumps(asdict(outcome) | {"key": self._key_of(part)}, indent=2) + "\n"
        self.file(part, "json.partial").write_text(content, encoding="utf-8")
        self.file(part, "json.partial").replace(self.file(part, "json"))
        return outcome

    def _measured(self, part: Part, limit_s: float) -> Outcome:
        start = time.monotonic()
        ending: Ending = "done"
        reason = ""
        with (
            self.file(part, "md").open("w", encoding="utf-8") as text,
            self.file(part, "log").open("w", encoding="utf-8") as log,
            watched(self.file(part, "clocks.csv"), self._gpu),
        ):
            for command in part.commands(self._setup):
                if not part.writes_markdown:
                    text.write(f"`{short(command)}`\n\n```\n")
                text.flush()
                code, has_timed_out = ran(
                    command, limit_s - (time.monotonic() - start), text.fileno(), log.fileno()
                )
                if not part.writes_markdown:
                    text.write("```\n\n")
                if has_timed_out:
                    ending, reason = "timed out", f"it took longer than {limit_s:.0f} seconds"
                    break
                if code not in _SAID_CODES:
                    ending, reason = "failed", f"`{short(command)}` ended with exit code {code}"
                    break
        return Outcome(name=part.name, ending=ending, reason=reason, seconds=time.monotonic() - start)

    def section(self, part: Part, outcome: Outcome | None) -> str:
        """The part's section of the page."""
        if outcome is None:
            return f"## {part.title}\n\nNot measured yet.\n"
        lines = [f"## {part.title}", ""]
        if outcome.ending != "done":
            lines += [f"**{outcome.ending.capitalize()}**: {outcome.reason}.", ""]
        if outcome.ending in ("skipped", "left out"):
            return "\n".join(lines)
        lines += [self.file(part, "md").read_text(encoding="utf-8", errors="replace").strip(), ""]
        if outcome.is_bad:
            log = self.file(part, "log").read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            lines += ["The end of its log:", "", "```", *log, "```", ""]
        lines += [f"{summary(self.file(part, 'clocks.csv'))} The part took {outcome.seconds:.0f} s.", ""]
        return "\n".join(lines)

    def _key_of(self, part: Part) -> str:
        commands = "; ".join(shlex.join(command) for command in part.commands(self._setup))
        return f"{self._key}; {commands}"


_SAID_CODES = (0, 3)
"""3: benchctl could decide nothing, which few blocks never can."""


def ran(command: Command, limit_s: float, out: int, err: int) -> tuple[int, bool]:
    """Exit code of a command, and if it was ended because its time was over. It dies with an interrupted call."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        program = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    except OSError as error:
        os.write(err, f"{error}\n".encode())
        return 127, False
    try:
        return program.wait(timeout=max(limit_s, 0)), False
    except subprocess.TimeoutExpired:
        return end(program), True
    except BaseException:
        end(program)
        raise


def end(program: "subprocess.Popen[bytes]") -> int:
    """End a program with all that it started: politely, so that servers are stopped, then in any case."""
    for ending in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, ending)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(timeout=GRACE_S)
    return program.wait()


def short(command: Command) -> str:
    """A command as a reader would call it."""
    words = ["python" if word == sys.executable else word.replace(f"{ROOT}/", "") for word in command]
    text = shlex.join(words)
    return text.replace("python -m benchctl ", "benchctl ", 1)
