"""Parts that ``--on slurm`` lacks on this machine, each with its remedy."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from benchctl.cluster.slurm.commands import SlurmCommandError, slurm_output
from benchctl.errors import MissingPackageError, UsageError
from benchctl.measure.doctor.check import Check

PROGRAMS: Final = ("sbatch", "srun", "squeue")
"""Programs of Slurm that a login node needs."""
_WITHOUT: Final = "'--on local' uses the GPUs of this host, and '--prepare' any other job system"
_CONTROLLER_LIMIT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Absence:
    """One thing that is not here: its name, the finding, and the remedy."""

    name: str
    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.finding}; {self.remedy}"


def what_is_missing() -> Iterator[Absence]:
    """Everything that submitting needs and that is missing here; none where blocks can be submitted."""
    if find_spec("submitit") is None:
        yield Absence("submitit", "the package submitit is not installed here", f"run: {_install_command()}")
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        several = "are" if len(absent) > 1 else "is"
        finding = f"{', '.join(absent)} {several} not on PATH, as on a machine that has no Slurm"
        yield Absence(
            "commands",
            finding,
            f"log in to a node of the cluster, or load its module ('module load slurm'); without Slurm, {_WITHOUT}",
        )
        return
    try:
        slurm_output(("sinfo", "--noheader", "--format", "%P"), _CONTROLLER_LIMIT_S)
    except SlurmCommandError as error:
        remedy = "check SLURM_CONF, or ask those who run the cluster ('scontrol ping' shows the controller)"
        yield Absence("controller", f"the controller of Slurm does not answer: {error}", remedy)


def require_slurm() -> None:
    """Raise UsageError that names everything that is missing; MissingPackageError where it is only the package."""
    missing = tuple(what_is_missing())
    if [absence.name for absence in missing] == ["submitit"]:
        raise MissingPackageError(["submitit"], "blocks cannot be submitted to Slurm")
    if missing:
        raise UsageError("\n".join(f"--on slurm cannot be used here: {absence}" for absence in missing))


def slurm_checks() -> tuple[Check, ...]:
    """The rows of ``benchctl doctor``: whether blocks can be submitted from here."""
    missing = tuple(what_is_missing())
    if missing:
        return tuple(
            Check(
                topic="cluster",
                name=f"slurm {absence.name}",
                finding=f"no --on slurm: {absence.finding}",
                remedy=absence.remedy,
                is_missing=True,
            )
            for absence in missing
        )
    version = slurm_output(("sinfo", "--version")).strip()
    partitions = slurm_output(("sinfo", "--noheader", "--format", "%P")).split()
    names = tuple(dict.fromkeys(partition.rstrip("*") for partition in partitions))
    return (
        Check(
            topic="cluster",
            name="slurm",
            finding=f"{version}, partitions {', '.join(names) or 'none'}",
            facts={"version": version, "partitions": names},
        ),
    )


def _install_command() -> str:
    return f"{sys.executable} -m pip install submitit"
