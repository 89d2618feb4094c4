"""Checks of installed engines: their path and version, read from each engine's own environment."""

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchctl.engines.environment import engines_directory, installed_versions, interpreter_for
from benchctl.engines.llamacpp import program_of
from benchctl.engines.sglang_lenvm.engine import fork_interpreter
from benchctl.engines.transformers.engine import NEEDED as NEEDED_BY_TRANSFORMERS
from benchctl.engines.vllm.engine import DISTRIBUTIONS as VLLM_DISTRIBUTIONS
from benchctl.errors import EngineUnavailableError
from benchctl.measure.doctor.check import Check
from benchctl.profile.engine_options import LlamaCppOptions, PythonOptions, ServerOptions

_TOPIC: Final = "engine"
_CALL_LIMIT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _PythonEngine:
    """The packages of which one is the engine, and packages without which it does not start."""

    packages: tuple[str, ...]
    needs: tuple[str, ...] = ("torch",)


_PYTHON_ENGINES: Final = {
    "vllm": _PythonEngine(packages=VLLM_DISTRIBUTIONS),
    "transformers": _PythonEngine(packages=("transformers",), needs=NEEDED_BY_TRANSFORMERS),
    "sglang": _PythonEngine(packages=("sglang",)),
}
KINDS: Final = ("vllm", "transformers", "llamacpp", "sglang")
"""Engines that have to be installed."""
_GUIDING: Final = {"vllm-lenvm": "vllm", "sglang-lenvm": "sglang"}
"""Engines that are checked only on request, each with the engine whose packages it consists of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededEngine:
    """An engine that must be installed, with the options that say where."""

    kind: str
    options: ServerOptions


def engine_checks(needed: Sequence[NeededEngine], *, has_gpu: bool) -> tuple[Check, ...]:
    """Check the simulator, which is always available, and each engine that can be installed."""
    demanded = {engine.kind: engine.options for engine in needed}
    kinds = (*KINDS, *(kind for kind in _GUIDING if kind in demanded))
    tasks = [
        partial(_check, kind, demanded.get(kind), is_needed=kind in demanded, has_gpu=has_gpu) for kind in kinds
    ]
    with ThreadPoolExecutor(max_workers=len(tasks)) as workers:
        checks = tuple(workers.map(lambda task: task(), tasks))
    return (Check(topic=_TOPIC, name="sim", finding="the simulator is part of benchctl", is_needed=True), *checks)


def _check(kind: str, options: ServerOptions | None, *, is_needed: bool, has_gpu: bool) -> Check:
    try:
        if kind == "llamacpp":
            return _program(
                options if isinstance(options, LlamaCppOptions) else LlamaCppOptions(), is_needed=is_needed
            )
        named = options.python if isinstance(options, PythonOptions) else None
        return _environment(kind, named, is_needed=is_needed, has_gpu=has_gpu)
    except EngineUnavailableError as error:
        detail = str(error) if is_needed else "not installed"
        remedy = _installation(kind, has_gpu=has_gpu)
        return Check(topic=_TOPIC, name=kind, finding=detail, remedy=remedy, is_missing=True, is_needed=is_needed)


def _installation(kind: str, *, has_gpu: bool) -> str:
    """The command that installs an engine; the fork has no script."""
    if kind == "sglang-lenvm":
        return "pip install -e sglang-LenVM/python, in an environment of its own that engine.python names"
    where = ", on a machine with an NVIDIA GPU" if kind == "sglang" and not has_gpu else ""
    return f"scripts/engines/install_{_GUIDING.get(kind, kind)}.sh{where}"


def _environment(kind: str, named: str | None, *, is_needed: bool, has_gpu: bool) -> Check:
    stock = _GUIDING.get(kind, kind)
    engine = _PYTHON_ENGINES[stock]
    if kind == "sglang-lenvm":
        python = fork_interpreter(named, engines_directory())
    else:
        python = interpreter_for(stock, named, engine.packages)
    versions = installed_versions(python, (*engine.packages, *engine.needs))
    lacking = [name for name in engine.needs if name not in versions]
    version = next(versions[name] for name in engine.packages if name in versions)
    torch = versions.get("torch", "")
    detail, remedy = f"{version}, torch {torch or 'missing'} ({python})", None
    if lacking:
        detail += f"; it does not start without {', '.join(lacking)}"
        remedy = f"scripts/engines/install_{stock}.sh"
    elif has_gpu and torch.endswith("+cpu"):
        detail += "; it computes on the CPU although a GPU is available"
        remedy = f"BENCHCTL_ENGINES_DEVICE=cuda scripts/engines/install_{stock}.sh"
    return Check(
        topic=_TOPIC,
        name=kind,
        finding=detail,
        remedy=remedy,
        is_missing=bool(lacking),
        is_needed=is_needed,
        facts={"version": version, "torch": torch or None, "python": str(python)},
    )


def _program(options: LlamaCppOptions, *, is_needed: bool) -> Check:
    program = program_of(options)
    version = _program_version(program)
    return Check(
        topic=_TOPIC,
        name="llamacpp",
        finding=f"{version or 'of unknown version'} ({program})",
        remedy=None if version else f"'{program} --version' fails; run scripts/engines/install_llamacpp.sh",
        is_missing=version is None,
        is_needed=is_needed,
        facts={"version": version, "program": str(program)},
    )


def _program_version(program: Path) -> str | None:
    """The version that ``llama-server`` reports; None if it cannot be started."""
    try:
        answer = subprocess.run(
            (str(program), "--version"), capture_output=True, text=True, check=True, timeout=_CALL_LIMIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = (answer.stderr + answer.stdout).splitlines()
    return next((line.removeprefix("version:").strip() for line in lines if line.startswith("version:")), "unknown")
