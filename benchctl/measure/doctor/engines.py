"""The check of each engine's installation: its place and version, from its own environment."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchctl.engines.engine import Installation, engine_for
from benchctl.errors import EngineUnavailableError
from benchctl.measure.doctor.check import Check
from benchctl.profile.engine_options import EngineSpec, ServerOptions, engine_specs

_check = partial(Check, topic="engine")


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
    return (_check(name="sim", finding="the simulator is part of benchctl", is_needed=True), *results)


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
        return _check(name=spec.kind, finding=finding, remedy=remedy, is_missing=True, is_needed=is_needed)
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
    return _check(
        name=spec.kind,
        finding=finding,
        remedy=remedy,
        is_missing=bool(missing),
        is_needed=is_needed,
        facts={"version": installation.version, "torch": torch, "python": str(installation.program)},
    )


def _program_check(spec: EngineSpec, installation: Installation, *, is_needed: bool) -> Check:
    version, program = installation.version, str(installation.program)
    return _check(
        name=spec.kind,
        finding=f"{version or 'of unknown version'} ({program})",
        remedy=None if version else f"'{program} --version' fails; run '{spec.installed_by} --force'",
        is_missing=version is None,
        is_needed=is_needed,
        facts={"version": version, "program": program},
    )
