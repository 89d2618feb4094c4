"""``benchctl`` as a process whose modules are loaded already: the fork of a server that has imported them."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_MODULES = (
    "benchctl.cli.app",
    "benchctl.cli.commands.run",
    "benchctl.measure.experiment",
    "benchctl.report.export",
    "benchctl.report.text.tables",
    "pytest",
    "tqdm",
)
"""Imports of most commands, which take longer than the commands; and the main module, which each fork imports."""


def benchctl(
    *args: object, cwd: Path | None = None, timeout_s: float = 180.0, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Run ``benchctl ARGS`` to its end, in ``cwd`` and with ``env`` added to the environment.

    The command has a process, signals, streams and an exit code of its own, as from a shell; only its modules are
    loaded before. Tests of the start, of the interpreter and of interrupts start a new interpreter instead.
    """
    argv = ["benchctl", *map(str, args)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_MODULES))
    with tempfile.TemporaryDirectory(prefix="benchctl-output-") as directory:
        streams = (Path(directory) / "stdout", Path(directory) / "stderr")
        where = str(cwd or Path.cwd())
        environment = {**os.environ, **(plain_environment(cwd) if cwd else {}), **env}
        process = context.Process(target=_run, args=(argv, where, environment, streams))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(argv, timeout_s)
        stdout, stderr = (stream.read_text(encoding="utf-8") for stream in streams)
    assert process.exitcode is not None
    return subprocess.CompletedProcess(argv, process.exitcode, stdout, stderr)


def plain_environment(cwd: Path) -> dict[str, str]:
    """A wide terminal, and no data sets, whatever this machine has."""
    return {"BENCHCTL_DATA_DIR": str(cwd / "no-data"), "COLUMNS": "200"}


def only_result(cwd: Path) -> Path:
    """The one result directory under ``cwd``, to which ``latest`` leads."""
    (path,) = (path for path in (cwd / "results").glob("*/*") if not path.is_symlink())
    assert (path.parent / "latest").resolve() == path.resolve()
    return path


def _run(argv: list[str], cwd: str, environment: Mapping[str, str], streams: tuple[Path, Path]) -> None:
    """In the fork: become the command."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams, start=1):
        handle = os.open(stream, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, number)
        os.close(handle)
    from benchctl.cli import main

    sys.argv = argv
    main()
