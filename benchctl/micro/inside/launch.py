"""Starts the worker: ``python launch.py`` in an interpreter that has torch.

The worker's modules are imported under their own names, from this folder and from nowhere else of benchctl: the
packages above it are stood in for by empty ones, because what they import is not installed where torch is.
"""

import sys

sys.path = [entry for entry in sys.path if entry != __file__.rpartition("/")[0]]  # its names would hide others

import json  # noqa: E402
from pathlib import Path  # noqa: E402
from types import ModuleType  # noqa: E402


def stand_in_for_packages() -> None:
    """Let ``benchctl.micro.inside`` be imported without benchctl's own packages."""
    root = Path(__file__).resolve().parents[2]
    for name, directory in (("benchctl", root), ("benchctl.micro", root / "micro")):
        package = ModuleType(name)
        package.__path__ = [str(directory)]
        sys.modules.setdefault(name, package)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 - the interpreter of an engine is not benchctl's
        message = f"{sys.executable} is Python {sys.version.split()[0]}; name one of 3.10 or later with --python"
        print(json.dumps({"failure": {"kind": "torch", "message": message}}))  # noqa: T201 - the answer
        sys.exit()
    stand_in_for_packages()
    from benchctl.micro.inside.worker import main

    main()
