"""Inspection of this machine before measuring on it.

    software ▸ machine ▸ GPUs ▸ peaks ▸ memory ▸ engines ▸ datasets: one ``Check`` for each part

Nothing is changed or downloaded, and programs are started only to read their version.
"""

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchctl import __version__
from benchctl.measure.doctor.check import Check
from benchctl.measure.doctor.engines import NeededEngine, engine_checks
from benchctl.measure.doctor.gpu import gpu_checks
from benchctl.measure.doctor.host import host_checks
from benchctl.measure.doctor.memory import memory_checks
from benchctl.measure.doctor.peaks import peak_checks
from benchctl.measure.provenance import git_state
from benchctl.measure.telemetry.gpu import gpu_inventory
from benchctl.profile.model import Profile
from benchctl.workload.datasets.dataset import dataset_files
from benchctl.workload.datasets.files import data_directory, file_state

_check = partial(Check, topic="software")
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
        _check(
            name="python",
            finding=f"{python} ({sys.executable})",
            facts={"version": python, "executable": sys.executable},
        ),
        _check(
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
