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
from functools import partial
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


def in_child(run: Callable[[], str | None], limit_s: float = LIMIT_S) -> str | None:
    """What ``run`` says is wrong, or None, in a child process; a problem too where it raises, hangs or dies."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_child()
        try:
            problem = run()
        except BaseException:  # noqa: BLE001 - whatever it is, it is a problem
            problem = traceback.format_exc()
        os.write(writer, json.dumps(problem and problem[-6_000:]).encode())
        os._exit(0)
    os.close(writer)
    if is_late := not _is_over(reader, pid, limit_s):
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if told:
        return json.loads(told)  # type: ignore[no-any-return]
    return f"took longer than {limit_s:g} s" if is_late else f"{_ENDED} ({status})"


def _is_over(reader: int, pid: int, limit_s: float) -> bool:
    """True once ``reader`` has something or was closed; False when the process has taken too long for it."""
    process = psutil.Process(pid)
    began_s = time.monotonic()
    while not select.select([reader], [], [], min(_LOOK_S, limit_s))[0]:
        if time.monotonic() - began_s >= _WALL_LIMITS * limit_s or sum(process.cpu_times()[:2]) >= limit_s:
            return False
    return True


def _become_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def command_codes(
    commands: Sequence[Sequence[str]], cwd: Path, *, has_plots: bool = True, limit_s: float = LIMIT_S
) -> list[int | None]:
    """Exit codes of ``benchctl`` with these arguments, one after the other, each in a fork of this process.

    What the command at ``i`` says is in ``cwd/i.txt``. A code is None where the command had to be killed, and -1
    where it killed its process. Without plots a report draws none, which takes most of its time.
    """

    def run(number: int) -> str:
        os.chdir(cwd)
        if not has_plots:
            sys.modules["benchctl.report.export"].why_not_drawn = lambda: "not asked for"  # type: ignore[attr-defined]
        return str(_code_of(commands[number], f"{number}.txt"))

    told = [in_child(partial(run, number), limit_s) or "" for number in range(len(commands))]
    return [int(word) if word.isdigit() else -1 if _ENDED in word else None for word in told]


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
    with mock.patch("os._exit", leave), mock.patch("sys.argv", ["benchctl", *argv]):
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
