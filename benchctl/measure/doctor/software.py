"""Inspection of this machine before measuring on it: its software, and every other topic in order.

    software ▸ machine ▸ GPUs ▸ peaks ▸ memory ▸ engines ▸ datasets: one ``Check`` for each part

Nothing is changed or downloaded, and programs are started only to read their version.
"""

import platform
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from benchctl import __version__
from benchctl.engines.engine import Installation, engine_for
from benchctl.errors import EngineUnavailableError, UsageError
from benchctl.measure.doctor.check import Check
from benchctl.measure.doctor.gpu import gpu_checks, peak_checks
from benchctl.measure.doctor.host import host_checks
from benchctl.measure.kv_memory import kv_shortfalls, value_models
from benchctl.measure.machine import git_state
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.profile.engine_options import ServerOptions
from benchctl.profile.engine_spec import EngineSpec
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.model import Profile
from benchctl.workload.datasets.base import data_directory, dataset_files, file_state

_SHORT_SHA: Final = 12


def inspect_machine(
    results: Path, engines: Mapping[str, ServerOptions], profile: Profile | None = None, *, needs_gpu: bool = False
) -> tuple[Check, ...]:
    """All checks, topic after topic, for measurements into ``results``.

    ``engines`` are those that must be installed, with the options that name their environments, by kind;
    ``profile`` is an experiment whose memory is checked.
    """
    gpus = gpu_checks(is_needed=needs_gpu or any(options.uses_gpu for options in engines.values()))
    has_gpu = not any(check.is_missing for check in gpus)
    return (
        *_versions(),
        *host_checks(results),
        *gpus,
        *peak_checks([gpu.name for gpu in gpu_inventory()]),
        *(() if profile is None else memory_checks(profile)),
        *engine_checks(engines, has_gpu=has_gpu),
        *(_data_set(name, data_directory()) for name in dataset_files()),
    )


def _versions() -> Iterator[Check]:
    python, git = platform.python_version(), git_state()
    facts = {"version": python, "executable": sys.executable}
    yield Check("software", "python", f"{python} ({sys.executable})", facts=facts)
    commit = None if git is None else git.sha[:_SHORT_SHA] + (" with changes" if git.is_dirty else "")
    finding = __version__ + (f", commit {commit}" if commit else "")
    yield Check("software", "benchctl", finding, facts={"version": __version__, "commit": commit})


def memory_checks(profile: Profile) -> Iterator[Check]:
    """One check for each value model of the profile, and one where the KV caches of the arms may differ."""
    check = partial(Check, "memory", is_needed=True)
    try:
        for directory, memory in value_models(profile).items():
            yield check(
                "value model",
                f"{memory} ({directory})",
                facts={"directory": directory, "weight_bytes": memory.weights, "prefix_bytes": memory.prefixes},
            )
    except UsageError as error:
        remedy = "name the directory of a value model with --set variants.NAME.server.value_model=DIR"
        yield check("value model", str(error), remedy=remedy, is_missing=True)
    for shortfall in kv_shortfalls(profile):
        remedy = "change one of these with --set, or in the profile"
        yield check("KV cache", shortfall.message, remedy=remedy, is_missing=shortfall.is_certain)


def engine_checks(needed: Mapping[str, ServerOptions], *, has_gpu: bool) -> tuple[Check, ...]:
    """Check the simulator, which is always available, and each engine that can be installed."""
    specs = [
        spec
        for spec in ENGINES.values()
        if spec.installed_by is not None and (spec.kind in needed or not spec.is_optional_check)
    ]
    with ThreadPoolExecutor(max_workers=len(specs)) as workers:
        installed = tuple(workers.map(lambda spec: _engine(spec, needed.get(spec.kind), has_gpu=has_gpu), specs))
    return (Check("engine", "sim", "the simulator is part of benchctl", is_needed=True), *installed)


def _engine(spec: EngineSpec, options: ServerOptions | None, *, has_gpu: bool) -> Check:
    """Check an engine, which is needed where its ``options`` are given."""
    check = partial(Check, "engine", spec.kind, is_needed=options is not None)
    finding = "not installed"
    try:
        installation = engine_for(spec.kind).installation(options)
    except EngineUnavailableError as error:
        installation = None
        finding = finding if options is None else str(error)
    if installation is None:
        where = ", on a machine with an NVIDIA GPU" if spec.needs_gpu and not has_gpu else ""
        return check(finding, remedy=f"{spec.installed_by}{where}", is_missing=True)
    finding, remedy, is_broken = _installed(spec, installation, has_gpu=has_gpu)
    facts = {"version": installation.version, "program": str(installation.program)}
    if installation.is_python:
        facts = {"version": installation.version, "torch": installation.torch, "python": str(installation.program)}
    return check(finding, remedy=remedy, is_missing=is_broken, facts=facts)


def _installed(spec: EngineSpec, installation: Installation, *, has_gpu: bool) -> tuple[str, str | None, bool]:
    """The installed software, in words; the remedy for what is wrong with it; and whether it cannot start."""
    version, program = installation.version, installation.program
    if not installation.is_python:
        remedy = None if version else f"'{program} --version' fails; run '{spec.installed_by} --force'"
        return f"{version or 'of unknown version'} ({program})", remedy, version is None
    torch, missing = installation.torch, installation.missing_packages
    finding = f"{version}, torch {torch or 'missing'} ({program})"
    if missing:
        return f"{finding}; it does not start without {', '.join(missing)}", f"{spec.installed_by} --force", True
    if has_gpu and torch is not None and torch.endswith("+cpu"):
        finding += "; it computes on the CPU although a GPU is available"
        return finding, f"{spec.installed_by} --device cuda", False
    return finding, None, False


def _data_set(name: str, directory: Path) -> Check:
    """Check the size only; ``benchctl data verify`` reads the whole file."""
    file = dataset_files()[name]
    state, path = file_state(file, directory, full=False), file.path_in(directory)
    finding = {
        "present": f"{path}",
        "missing": f"not in {directory}",
        "damaged": f"{path} does not have the size of the published file",
    }[state]
    remedy = None if state == "present" else f"benchctl data fetch {name}"
    facts = {"path": str(path), "state": state}
    return Check("data", name, finding, remedy=remedy, is_missing=state == "missing", facts=facts)
