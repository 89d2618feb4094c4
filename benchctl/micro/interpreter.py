"""The interpreter that has torch: benchctl itself needs none, and the environments of engines bring one."""

import os
import sys
from pathlib import Path

from benchctl.engines.environment import engines_directory, installed_versions, interpreter_problem
from benchctl.errors import EngineUnavailableError

_TORCH = ("torch",)


def find_torch_python(named: Path | None) -> Path:
    """The named interpreter, else benchctl's own if it has torch, else that of an installed engine.

    Among engines one whose torch was built for a GPU comes first. Raises EngineUnavailableError where none has it.
    """
    if named is not None:
        return _checked(named.expanduser())
    if installed_versions(Path(sys.executable), _TORCH):
        return Path(sys.executable)
    directory = engines_directory()
    candidates = [python for python in sorted(directory.glob("*/bin/python")) if os.access(python, os.X_OK)]
    versions = {python: installed_versions(python, _TORCH).get("torch") for python in candidates}
    having = sorted((version.endswith("+cpu"), python) for python, version in versions.items() if version)
    if having:
        return having[0][1]
    raise EngineUnavailableError(
        f"torch is not installed: neither {sys.executable} nor an engine's environment in {directory} has it; run "
        "'benchctl engines install transformers', or name an interpreter that has it with "
        "--python /path/to/venv/bin/python"
    )


def _checked(python: Path) -> Path:
    if problem := interpreter_problem(python, _TORCH, f"run {python} -m pip install 'torch>=2.6'"):
        raise EngineUnavailableError(f"--python {python} {problem}")
    return python
