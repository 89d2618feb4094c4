"""``benchctl`` for tests: a process for each command, whose modules a server has loaded before."""

import atexit
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from benchctl.cli import _run

WITHOUT_PICTURES = {"BENCHCTL_TEST_WITHOUT_PICTURES": "1"}
"""Leaves out the pictures of an experiment, which take a second or two."""
WITH_PICTURES = {"BENCHCTL_TEST_WITHOUT_PICTURES": ""}
WITHOUT_SERVERS = {"BENCHCTL_TEST_WITHOUT_SERVERS": "1", **WITHOUT_PICTURES}
"""For tests of what is around the runs of an experiment: ``run`` simulates them in virtual time, in a moment."""
NO_ROOM_FOR_PICTURES = "ulimit -v 60000000"
"""For a shell: less address space than what draws pictures reserves, for commands in new interpreters."""
_PROGRAMS = Path(__file__).parent / "servers" / "programs"


def benchctl(
    *args: object, cwd: Path | None = None, timeout_s: float = 180.0, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Run ``benchctl ARGS`` to its end, in ``cwd`` and with ``env`` added to the environment.

    The command has a process, signals, streams and an exit code of its own, as from a shell; only its modules are
    loaded before. Tests of the start, of the interpreter and of interrupts start a new interpreter instead.
    An experiment has no pictures unless ``env`` has WITH_PICTURES.
    """
    return subprocess.run(
        [str(preloaded_directory() / "benchctl"), *map(str, args)],
        cwd=cwd,
        env={**os.environ, **(plain_environment(cwd) if cwd else {}), **WITHOUT_PICTURES, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def printed(*args: object, code: int = 0, **options: Any) -> str:
    """The output of ``benchctl ARGS``, which ends with ``code``."""
    done = benchctl(*args, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def document(*args: object, **options: Any) -> Any:
    """The JSON document that ``benchctl ARGS --json`` prints."""
    return json.loads(printed(*args, "--json", **options))


def refusal(*args: object, code: int = 2, **options: Any) -> str:
    """The message with which ``benchctl ARGS`` is refused; it ends with ``code``."""
    done = benchctl(*args, **options)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def in_process(*args: object) -> tuple[int, str, str]:
    """Exit code, output and messages of ``benchctl ARGS`` in this process, whose streams and signals stay."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ),
        mock.patch("sys.argv", ["benchctl", *map(str, args)]),
        mock.patch("threading.excepthook"),
        mock.patch("benchctl.cli.steady_streams"),
        mock.patch("benchctl.cli._handle_signals"),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        return _run(), out.getvalue(), err.getvalue()


@cache
def preloaded_directory() -> Path:
    """A directory for PATH whose ``benchctl`` is the fork of a server that this test process keeps.

    The server ends with the test process.
    """
    directory = tempfile.TemporaryDirectory(prefix="benchctl-preloaded-")
    path = Path(directory.name)
    argv = [sys.executable, str(_PROGRAMS / "preloaded_benchctl.py"), str(path / "socket")]
    server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    atexit.register(_end, server, directory)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    client = (_PROGRAMS / "benchctl_client.py").read_text(encoding="utf-8")
    address = f"{str(path / 'socket')!r}"
    program = path / "benchctl"
    program.write_text(f"#!{sys.executable} -IS\n" + client.replace('os.environ["BENCHCTL_TEST_SERVER"]', address))
    program.chmod(0o755)
    return path


def _end(server: "subprocess.Popen[bytes]", directory: "tempfile.TemporaryDirectory[str]") -> None:
    server.communicate()
    directory.cleanup()


def plain_environment(cwd: Path) -> dict[str, str]:
    """A wide terminal, and no data sets, whatever this machine has."""
    return {"BENCHCTL_DATA_DIR": str(cwd / "no-data"), "COLUMNS": "1000"}


@contextmanager
def started(*args: object, cwd: Path, **env: str) -> Iterator["subprocess.Popen[str]"]:
    """``benchctl ARGS`` in a new interpreter and in a session of its own; killed where it still runs at the end.

    Its memory is limited so that it draws no pictures.
    """
    process = subprocess.Popen(
        ["sh", "-c", f'{NO_ROOM_FOR_PICTURES}; exec "$0" -m benchctl "$@"', sys.executable, *map(str, args)],
        cwd=cwd,
        env={**os.environ, **plain_environment(cwd), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def only_result(cwd: Path) -> Path:
    """The one result directory under ``cwd``, to which ``latest`` leads, or ``latest-simulated``."""
    (path,) = (path for path in (cwd / "results").glob("*/*") if not path.is_symlink())
    (link,) = path.parent.glob("latest*")
    assert link.resolve() == path.resolve()
    return path
