"""Inspection of this machine before measuring on it: its software, and every other topic in order."""

import platform
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchctl import __version__
from benchctl.engines.engine import Installation, engine_for
from benchctl.errors import EngineUnavailableError, UsageError
from benchctl.measure.doctor.check import Check
from benchctl.measure.doctor.gpu import gpu_checks, peak_checks
from benchctl.measure.doctor.host import host_checks
from benchctl.measure.kv_memory import KvPlan, plan_kv_memory, value_models
from benchctl.measure.machine import git_state
from benchctl.measure.telemetry.gpu import gpu_inventory
from benchctl.profile.engine_options import EngineSpec, ServerOptions, engine_specs
from benchctl.profile.model import Profile
from benchctl.workload.datasets.base import data_directory, dataset_files, file_state

_check = partial(Check, topic="memory", is_needed=True)


def memory_checks(profile: Profile) -> tuple[Check, ...]:
    """One check for each value model of the profile, and one for the KV cache beside the largest."""
    plan = plan_kv_memory(profile)
    return (*_value_model_checks(profile), *_kv_checks(plan))


def _value_model_checks(profile: Profile) -> Iterator[Check]:
    try:
        for directory, memory in value_models(profile).items():
            yield _check(
                name="value model",
                finding=f"{memory} ({directory})",
                facts={"directory": directory, "weight_bytes": memory.weights, "prefix_bytes": memory.prefixes},
            )
    except UsageError as error:
        remedy = "name the directory of a value model with --set variants.NAME.server.value_model=DIR"
        yield _check(name="value model", finding=str(error), remedy=remedy, is_missing=True)


def _kv_checks(plan: KvPlan) -> Iterator[Check]:
    if plan.refusal is not None:
        remedy = "change one of these with --set, or in the profile"
        yield _check(name="KV cache", finding=plan.refusal, remedy=remedy, is_missing=True)
    elif plan.memory is not None:
        facts = {"kv_cache_bytes": plan.memory.num_bytes, "device_bytes": plan.memory.device_bytes}
        yield _check(name="KV cache", finding=str(plan.text), facts=facts)
    elif plan.text is not None:
        yield _check(name="KV cache", finding=plan.text)


_check_engines = partial(Check, topic="engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededEngine:
    """An engine that must be installed, with the options that name its environment."""

    kind: str
    options: ServerOptions


def engine_checks(needed: Sequence[NeededEngine], *, has_gpu: bool) -> tuple[Check, ...]:
    """Check the simulator, which is always available, and each engine that can be installed."""
    options = {engine.kind: engine.options for engine in needed}
    checks = [
        partial(_check_engine, spec, options.get(spec.kind), is_needed=spec.kind in options, has_gpu=has_gpu)
        for spec in engine_specs()
        if spec.installed_by is not None and (spec.kind in options or not spec.is_optional_check)
    ]
    with ThreadPoolExecutor(max_workers=len(checks)) as workers:
        results = tuple(workers.map(lambda check: check(), checks))
    return (_check_engines(name="sim", finding="the simulator is part of benchctl", is_needed=True), *results)


def _check_engine(spec: EngineSpec, options: ServerOptions | None, *, is_needed: bool, has_gpu: bool) -> Check:
    try:
        installation = engine_for(spec.kind).installation(options)
    except EngineUnavailableError as error:
        finding, installation = str(error) if is_needed else "not installed", None
    else:
        finding = "not installed"
    if installation is None:
        where = ", on a machine with an NVIDIA GPU" if spec.needs_gpu and not has_gpu else ""
        remedy = f"{spec.installed_by}{where}"
        return _check_engines(name=spec.kind, finding=finding, remedy=remedy, is_missing=True, is_needed=is_needed)
    if not installation.is_python:
        return _program_check(spec, installation, is_needed=is_needed)
    return _python_check(spec, installation, is_needed=is_needed, has_gpu=has_gpu)


def _python_check(spec: EngineSpec, installation: Installation, *, is_needed: bool, has_gpu: bool) -> Check:
    torch, missing = installation.torch, installation.missing_packages
    finding, remedy = f"{installation.version}, torch {torch or 'missing'} ({installation.program})", None
    if missing:
        finding += f"; it does not start without {', '.join(missing)}"
        remedy = f"{spec.installed_by} --force"
    elif has_gpu and torch is not None and torch.endswith("+cpu"):
        finding += "; it computes on the CPU although a GPU is available"
        remedy = f"{spec.installed_by} --device cuda"
    return _check_engines(
        name=spec.kind,
        finding=finding,
        remedy=remedy,
        is_missing=bool(missing),
        is_needed=is_needed,
        facts={"version": installation.version, "torch": torch, "python": str(installation.program)},
    )


def _program_check(spec: EngineSpec, installation: Installation, *, is_needed: bool) -> Check:
    version, program = installation.version, str(installation.program)
    return _check_engines(
        name=spec.kind,
        finding=f"{version or 'of unknown version'} ({program})",
        remedy=None if version else f"'{program} --version' fails; run '{spec.installed_by} --force'",
        is_missing=version is None,
        is_needed=is_needed,
        facts={"version": version, "program": program},
    )


_check_doctor = partial(Check, topic="software")
_SHORT_SHA: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of the planned measurement beyond those of the simulator."""

    results: Path
    engines: Sequence[NeededEngine] = ()
    gpu: bool = False
    profile: Profile | None = None
    """Experiment whose memory is checked."""


def inspect_machine(needs: Needs) -> tuple[Check, ...]:
    """All checks, topic after topic."""
    gpus = gpu_checks(is_needed=needs.gpu or any(engine.options.uses_gpu for engine in needs.engines))
    has_gpu = not any(check.is_missing for check in gpus)
    return (
        *_software(),
        *host_checks(needs.results),
        *gpus,
        *peak_checks([gpu.name for gpu in gpu_inventory()]),
        *(() if needs.profile is None else memory_checks(needs.profile)),
        *engine_checks(needs.engines, has_gpu=has_gpu),
        *(_data_set(name, data_directory()) for name in dataset_files()),
    )


def _software() -> tuple[Check, ...]:
    python = platform.python_version()
    git = git_state()
    commit = None if git is None else git.sha[:_SHORT_SHA] + (" with changes" if git.is_dirty else "")
    return (
        _check_doctor(
            name="python",
            finding=f"{python} ({sys.executable})",
            facts={"version": python, "executable": sys.executable},
        ),
        _check_doctor(
            name="benchctl",
            finding=__version__ + (f", commit {commit}" if commit else ""),
            facts={"version": __version__, "commit": commit},
        ),
    )


def _data_set(name: str, directory: Path) -> Check:
    """Check the size only; ``benchctl data verify`` reads the whole file."""
    file = dataset_files()[name]
    state, path = file_state(file, directory, full=False), file.path_in(directory)
    detail = {
        "present": f"{path}",
        "missing": f"not in {directory}",
        "damaged": f"{path} does not have the size of the published file",
    }
    return Check(
        topic="data",
        name=name,
        finding=detail[state],
        remedy=None if state == "present" else f"benchctl data fetch {name}",
        is_missing=state == "missing",
        facts={"path": str(path), "state": state},
    )
