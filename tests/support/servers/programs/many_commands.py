"""Runs many commands of benchctl in the environment that this interpreter was started in, each in a fork of it.

``many_commands.py FILE``: FILE holds a list of commands as JSON. Each has ``argv``, ``cwd``, ``stdin``, ``stdout``
and ``stderr``: a path, ``pipe`` for one whose reader has left, or null for a closed stream. The exit codes are
written to FILE as JSON. Imports take longer than most commands.
"""

import gc
import importlib
import json
import os
import sys
from pathlib import Path

_NAMES = ("stdin", "stdout", "stderr")
for _module in (
    "benchctl.cli.app",
    "benchctl.cli.commands.compare",
    "benchctl.measure.experiment",
    "benchctl.report.export",
):
    importlib.import_module(_module)
gc.freeze()  # no command searches what was loaded for cycles


def descriptor(place: str, number: int) -> int:
    """A descriptor of a stream that the command reads or writes."""
    if place == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    return os.open(place, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def become(command: dict[str, object]) -> None:
    """In the fork: take the streams and run; a closed stream is None, as where an interpreter starts so."""
    for number, name in enumerate(_NAMES):
        place = command[name]
        if place is None:
            os.close(number)
            setattr(sys, name, None)
        else:
            opened = descriptor(str(place), number)
            os.dup2(opened, number)
            os.close(opened)
    os.chdir(str(command["cwd"]))
    sys.argv = ["benchctl", *map(str, command["argv"])]  # type: ignore[call-overload]
    importlib.import_module("benchctl.cli").main()


def exit_code(command: dict[str, object]) -> int:
    """Run one command to its end."""
    child = os.fork()
    if not child:
        try:
            become(command)
        except BaseException as error:  # noqa: BLE001 - a traceback is what is looked for
            Path(str(command["cwd"]), "escaped.txt").write_text(f"Traceback {error!r}", encoding="utf-8")
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


commands = Path(sys.argv[1])
commands.write_text(json.dumps([exit_code(each) for each in json.loads(commands.read_bytes())]), encoding="utf-8")
