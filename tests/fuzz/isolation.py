"""Cases in processes of their own: one that hangs is killed, one that crashes is told from one that fails."""

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from unittest import mock

import psutil

LIMIT_S: Final = 10.0
"""No reader and no command may take more processor time on a small input, nor six times that in all: on a busy
machine the time on the clock says little."""
_WALL_LIMITS: Final = 6
_LOOK_S: Final = 0.5
_ENDED: Final = "the process ended"
_MEMORY_BYTES: Final = 4 << 30


def in_children(count: int, run: Callable[[int], str | None], limit_s: float = LIMIT_S) -> dict[int, str]:
    """Problems of the cases ``0 … count - 1`` by number; ``run`` says what is wrong with one, or None.

    One child process takes case after case; where it hangs or dies, another one goes on with the next.
    """
    problems: dict[int, str] = {}
    first = 0
    while first < count:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _become_child()
            warnings.simplefilter("ignore")
            _run_all(range(first, count), run, writer)
        os.close(writer)
        first, problem = _followed(pid, reader, first, problems, limit_s)
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if first < count:
            problems[first] = problem or f"{_ENDED} ({status})"
            first += 1
    return problems


def _is_told(reader: int, pid: int, limit_s: float) -> bool:
    """True once ``reader`` has something; False when the process ``pid`` has taken too long for it."""
    process = psutil.Process(pid)
    began_s, used_s = time.monotonic(), sum(process.cpu_times()[:2])
    while not select.select([reader], [], [], min(_LOOK_S, limit_s))[0]:
        is_late = time.monotonic() - began_s >= _WALL_LIMITS * limit_s
        if is_late or sum(process.cpu_times()[:2]) - used_s >= limit_s:
            return False
    return True


def _followed(pid: int, reader: int, first: int, problems: dict[int, str], limit_s: float) -> tuple[int, str]:
    """Collect what the child says; returns the number of the case in which it ended and, if it hung, that."""
    pending = b""
    while _is_told(reader, pid, limit_s):
        read = os.read(reader, 1 << 16)
        if not read:
            return first, ""
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            if (problem := json.loads(line)) is not None:
                problems[first] = problem
            first += 1
    return first, f"took longer than {limit_s:g} s"


def _run_all(numbers: Sequence[int], run: Callable[[int], str | None], writer: int) -> None:
    try:
        for number in numbers:
            try:
                problem = run(number)
            except BaseException:  # noqa: BLE001 - whatever it is, it is a problem
                problem = traceback.format_exc()
            os.write(writer, json.dumps(problem if problem is None else problem[-6_000:]).encode() + b"\n")
    finally:
        os._exit(0)


def _become_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def command_codes(
    commands: Sequence[Sequence[str]], cwd: Path, *, has_plots: bool = True, limit_s: float = LIMIT_S
) -> list[int | None]:
    """Exit codes of ``benchctl`` with these arguments, one after the other in one fork of this process.

    What the command at ``i`` says is in ``cwd/i.txt``. A code is None where the command had to be killed, and -1
    where it killed its process. Without plots a report draws none, which takes most of its time.
    """

    def run(number: int) -> str:
        os.chdir(cwd)
        if not has_plots:
            sys.modules["benchctl.report.export"].why_not_drawn = lambda: "not asked for"  # type: ignore[attr-defined]
        return str(_code_of(commands[number], f"{number}.txt"))

    told = in_children(len(commands), run, limit_s)
    return [int(word) if word.isdigit() else -1 if _ENDED in word else None for _, word in sorted(told.items())]


class _LeavingError(BaseException):
    """In place of the end of the process, which ``main`` asks for."""


def _code_of(argv: Sequence[str], output: str) -> int:
    """Run a command in this process, which goes on; all that it says is written to ``output``."""
    from benchctl.cli import main

    def leave(code: int) -> None:
        raise _LeavingError(code)

    for number, path in ((0, os.devnull), (1, output), (2, output)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    with mock.patch("os._exit", leave), mock.patch("sys.argv", ["benchctl", *argv]), warnings.catch_warnings():
        try:
            main()
        except _LeavingError as leaving:
            return int(leaving.args[0])
        except BaseException:  # noqa: BLE001 - what the interpreter would print
            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    return 70


class Deadline:
    """The end of a time budget."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._end
