"""The cluster section of a profile: what the job of one block asks of the scheduler.

Nothing of it is measured, and the identity of an experiment leaves it out: the same experiment may be continued
on another partition. Texts that stand in the header of a job script have no spaces and no quotes.
"""

import re
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator

from benchctl.profile.choices import MAX_DEVICES, Section, ThreadCount
from benchctl.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, SECONDS_PER_MINUTE
from benchctl.untrusted.secrets import holds_key

ContainerRuntime = Literal["apptainer", "pyxis"]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.:@+,/-]*$", max_length=255)]
"""A name of the scheduler, or several with commas."""
Nodes = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.,\[\]-]*$", max_length=4000)]
"""Names of nodes, with ranges in brackets."""
Features = Annotated[str, Field(pattern=r"^[\w\[(!][\w.\[\]()&|,*!:=-]*$", max_length=1000)]
"""Features of nodes, with the scheduler's operators."""
Memory = Annotated[str, Field(pattern=r"^[0-9]{1,12}[KMGT]?$")]
_SECONDS: Final = {"days": SECONDS_PER_DAY, "hours": SECONDS_PER_HOUR, "minutes": SECONDS_PER_MINUTE, "seconds": 1}
_TIMES: Final = (
    re.compile(r"(?P<minutes>\d{1,9})(:(?P<seconds>\d{1,2}))?"),
    re.compile(r"(?P<hours>\d{1,6}):(?P<minutes>\d{1,2}):(?P<seconds>\d{1,2})"),
    re.compile(r"(?P<days>\d{1,5})-(?P<hours>\d{1,2})(:(?P<minutes>\d{1,2})(:(?P<seconds>\d{1,2}))?)?"),
)


def scheduler_seconds(text: str) -> int | None:
    """The seconds of a time as Slurm writes and reads it; None for any other text.

    Its forms are ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``,
    ``days-hours:minutes`` and ``days-hours:minutes:seconds`` (man sbatch, --time).
    """
    match = next((whole for form in _TIMES if (whole := form.fullmatch(text.strip()))), None)
    if match is None:
        return None
    return sum(int(value) * _SECONDS[unit] for unit, value in match.groupdict(default="0").items())


class ClusterSettings(Section):
    """The job of one block on a cluster, and how often it is submitted again."""

    partition: Word | None = None
    """Partition, or several with commas; null: the cluster's own default, as for every key without a value."""
    account: Word | None = None
    """Account that the jobs are charged to."""
    qos: Word | None = None
    """Quality of service."""
    gpus_per_block: Annotated[int, Field(ge=0, le=MAX_DEVICES)] | None = None
    """GPUs of one block, which its servers use one after the other. null: as many as the largest server is spread
    over where the engine needs a GPU, and none for simulated and attached servers; for an engine that can do with
    or without, Slurm has to be told."""
    cpus: ThreadCount | None = None
    """Processor cores of one block, for the server and the client together."""
    mem: Memory | Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    """Memory of one block, such as ``64G``; a number alone is in MB, as Slurm has it."""
    exclusive: bool = False
    """True: a block has its node to itself, so that no other job disturbs it. Its other GPUs are then idle."""
    time: str | Annotated[int, Field(ge=1, le=5_256_000)] | None = None
    """Time limit of one block, as Slurm writes it: ``HH:MM:SS``, ``D-HH:MM:SS`` or minutes. A block that needs
    longer is refused."""
    constraint: Features | None = None
    """Features that a node must have, such as ``h100``."""
    exclude: Nodes | None = None
    """Nodes that no block may have, such as ``node[3,7-9]``."""
    python: str | None = None
    """Interpreter with benchctl on the nodes, or in the container; null: the one that submits, in a container
    ``python3``."""
    setup: tuple[str, ...] = Field(default=(), max_length=200)
    """Lines of shell before the block, such as ``module load cuda``."""
    container: str | None = None
    """Image in which blocks are measured: a file or an address that the runtime takes. benchctl must be in it."""
    container_runtime: ContainerRuntime = "apptainer"
    """Program that starts the container: ``apptainer`` (also SingularityCE), or ``pyxis``, a plug-in of Slurm."""
    parallel: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Most blocks at the same time; null: as many as the scheduler starts."""
    lease_s: float = Field(default=120.0, ge=1, le=3600)
    """Time without a sign of life after which the block of a lost node is given to another. Each task gives one
    every sixth of it."""
    warn_s: int = Field(default=60, ge=1, le=65_535)
    """Seconds before the time limit at which the scheduler warns a task, which then ends its run; Slurm may warn
    up to a minute earlier."""
    resubmissions: int = Field(default=2, ge=0, le=100)
    """Times that blocks whose task ended without ending them are submitted again by a command that waits."""

    @field_validator("time")
    @classmethod
    def _is_time(cls, value: str | int | None) -> str | int | None:
        if isinstance(value, str) and not scheduler_seconds(value):
            raise ValueError(f"is {value!r}; write HH:MM:SS, D-HH:MM:SS, or minutes, above 0")
        return value

    @field_validator("setup")
    @classmethod
    def _has_no_secrets(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        if any(holds_key(line) for line in lines):
            raise ValueError(
                "holds what looks like a secret, which profiles and results must not hold; set it in the shell "
                "that submits, whose variables tasks inherit"
            )
        return lines

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds; None where the cluster has its own."""
        return None if self.time is None else scheduler_seconds(str(self.time))
