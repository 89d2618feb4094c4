"""The manifest and the plan of an experiment: profile, machine, order of the runs, and the stopping rule."""

from collections.abc import Collection
from typing import Annotated, Literal, TypeAlias

import msgspec

from benchctl.records.node import GpuInfo
from benchctl.records.record import Amount, Cell, Count, ExperimentState, Record, ResultWarning, Size

StopMode: TypeAlias = Literal["forced", "natural", "replay-natural"]
"""End of an output: its planned length, the model's choice, or the length that the baseline's model gave it."""


class PlannedRun(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One run of the plan."""

    index: Count
    """Position in the plan, from 0."""
    run_id: str
    """Name of the run and of its directory."""
    block: Count
    """Block that the run belongs to, from 0."""
    position: Count
    """Position within the block, from 0."""
    variant: str
    """Variant to be served."""
    cell: Cell = {}
    """Value of each swept factor; empty for the baseline."""


class Plan(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The ordered runs of an experiment."""

    schema_version: int
    """Version of the result format."""
    runs: tuple[PlannedRun, ...]
    """Runs in the order of execution."""

    def num_blocks_of(self, done: Collection[str]) -> int:
        """Number of blocks all of whose runs are among ``done``, by ``run_id``."""
        return len({run.block for run in self.runs} - {run.block for run in self.runs if run.run_id not in done})


class GitState(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Commit of the code that measured."""

    sha: str
    """Commit."""
    is_dirty: bool
    """Whether the work tree differed from the commit."""


class HostInfo(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The measuring machine."""

    hostname: str
    """Name of the machine."""
    platform: str
    """Operating system and its version."""
    python: str
    """Version of the interpreter that ran benchctl."""
    cpu_model: str | None = None
    """Name of the processor."""
    num_cores: Count | None = None
    """Processor cores."""
    memory_bytes: Size | None = None
    """Main memory."""


class HalfWidth(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Precision of one metric of one cell at a look."""

    cell: str
    """The cell, such as ``guided top_k=3``."""
    metric: str
    """Name of the metric."""
    num_blocks: Count
    """Blocks that count."""
    half_width_frac: Amount | None = None
    """Half the interval of the ratio, as a fraction; unknown below six blocks."""


class Look(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One interim look of the stopping rule."""

    num_blocks: Count
    """Blocks run by then, whether they count or not."""
    half_widths: tuple[HalfWidth, ...]
    """Precision of each primary metric of each cell."""
    is_precise: bool
    """Every half-width was within the precision: the experiment ended here."""


class StoppingRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The rule by which an experiment may end before its last block, and its looks.

    All but ``looks`` is written before the first run. An estimate from such an experiment owes the correction for
    all of ``look_blocks``, whether or not it ended early.
    """

    precision_frac: Amount
    """Half-width at which the experiment ends, as a fraction."""
    confidence: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    """Of the intervals at each look: 1 - 0.05 / number of looks."""
    look_blocks: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    """Blocks after which there is a look; the last is the most that would be run."""
    looks: tuple[Look, ...] = ()
    """Looks so far."""

    @property
    def ended_after(self) -> int | None:
        """Blocks after which the rule ended the experiment before its last one; None where it did not."""
        ended = [look.num_blocks for look in self.looks if look.is_precise]
        return ended[0] if ended and ended[0] < self.look_blocks[-1] else None


class Extension(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks that were added to an experiment after it had begun."""

    extended_at: str
    """UTC, ISO 8601."""
    from_blocks: Count
    """Planned blocks before."""
    to_blocks: Count
    """Planned blocks from then on."""
    num_done: Count
    """Runs that were done by then, whose results could be seen."""
    num_looks: Count
    """Looks at the data by which intervals are corrected from then on: one more than there are extensions."""


class Imported(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The origin of results that benchctl did not measure; the files themselves are kept with its records."""

    tool: str
    """Program that measured."""
    source: str
    """Directory that was read."""
    sha256: dict[str, str]
    """SHA-256 of each file that was read, by its name in the source."""
    revisions: tuple[str, ...] = ()
    """Revisions of the server that fit its output."""


class Manifest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The experiment: its profile, request set, machine and state."""

    schema_version: int
    """Version of the result format."""
    state: ExperimentState
    """State of the whole experiment."""
    profile: str
    """Name of the profile."""
    profile_sha256: str
    """SHA-256 of the resolved profile: resuming demands the same."""
    request_set_sha256: str
    """SHA-256 of ``requests.jsonl``."""
    dataset: str
    """True source of the request set, for example ``gsm8k/test`` or ``generated``."""
    seed: int
    """Seed of every random stream."""
    blocks: Count
    """Planned blocks, with those that were added."""
    baseline: str
    """Name of the variant that the others are compared with."""
    stop: StopMode
    """End of an output."""
    lengths_from: str | None = None
    """Result directory in which the natural lengths of the request set were measured."""
    stopping: StoppingRecord | None = None
    """The rule that may end the experiment early; None where the number of blocks is fixed."""
    extensions: tuple[Extension, ...] = ()
    """Additions of blocks to the experiment after it had begun, in order."""
    engine: str
    """Kind of server software."""
    label: str | None = None
    """Remark of the user."""
    created_at: str
    """UTC, ISO 8601."""
    argv: tuple[str, ...]
    """Command line of benchctl."""
    benchctl_version: str
    """Version of benchctl."""
    versions: dict[str, str] = {}
    """Versions of the packages that measured."""
    git: GitState | None = None
    """Commit of the code that measured, if it ran from a work tree."""
    host: HostInfo
    """The measuring machine."""
    gpus: tuple[GpuInfo, ...] = ()
    """Visible devices."""
    imported: Imported | None = None
    """None where benchctl measured. Of imported results, ``host`` and ``versions`` are unknown."""
    warnings: tuple[ResultWarning, ...] = ()
    """Limits on the use of the whole experiment."""

    @property
    def directory_name(self) -> str:
        """Name of its result directory where nobody chose another: ``<utc>-<hash8>``."""
        utc = self.created_at.replace("-", "").replace(":", "")
        return f"{utc}-{self.profile_sha256[:8]}"
