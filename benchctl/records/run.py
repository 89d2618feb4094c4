"""The record of one run: one fresh server and one workload."""

from typing import Annotated, Any, Final, Literal

import msgspec

from benchctl.records.node import NodeInfo
from benchctl.records.record import Cell, Count, Int64, MomentNs, Record, ResultWarning, RunState, Size
from benchctl.records.step import Clock

ENDED: Final[frozenset[RunState]] = frozenset({"done", "failed", "suspect"})
"""States of runs to which nothing more is written, unless they are measured again."""
INTERRUPTED: Final = "interrupted"
"""Cause of the failure of a run that a signal, or the death of its process, cut off; it is measured again."""


class RunTimes(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Beginnings of the parts of one run, on the client's monotonic clock."""

    launch_ns: MomentNs | None = None
    """Start of the server's process."""
    ready_ns: MomentNs | None = None
    """First answer of its health check."""
    warmup_start_ns: MomentNs | None = None
    """First request of the warm-up."""
    first_send_ns: MomentNs | None = None
    """First request of the load."""
    last_token_ns: MomentNs | None = None
    """Last token of the load."""
    stop_ns: MomentNs | None = None
    """Request to the server to end."""


class RunFailure(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The failure of a run, with the end of the server's log."""

    cause: str
    """Class of the failure, such as ``out-of-memory``."""
    message: str
    """Text of the failure, with its remedy."""
    log_tail: str = ""
    """Last lines of the server's log."""


class FileDigest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Content and times of a file to which nothing more is written."""

    sha256: str
    """SHA-256 of the content, in hexadecimal digits."""
    size_bytes: Size
    """Size of the file."""
    mtime_ns: Int64
    """Time of its last change, nanoseconds since 1970."""


class RunRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One fresh server and one workload."""

    schema_version: int
    """Version of the result format."""
    index: Count
    """Position in the plan, from 0."""
    run_id: str
    """Name of the run and of its directory."""
    block: Count
    """Block that the run belongs to, from 0."""
    position: Count
    """Position within the block, from 0."""
    variant: str
    """Variant that was served."""
    cell: Cell = {}
    """Value of each swept factor; empty for the baseline."""
    state: RunState = "planned"
    """How far the run came, and whether its numbers may be used."""
    attempt: Count = 0
    """Tries at this run so far."""
    argv: tuple[str, ...] = ()
    """Command line of the server, secrets removed."""
    env: dict[str, str] = {}
    """Variables set for the server, secrets removed."""
    engine: str | None = None
    """Kind of server software."""
    engine_version: str | None = None
    """Version that the server reports."""
    effective_config: dict[str, Any] = {}
    """Settings that the server reports, flat: one key per setting."""
    host: str | None = None
    """Name of the machine that did the run; None in older records."""
    node: NodeInfo | None = None
    """Machine, devices and software that did the run; None in older records."""
    client_priority: str | None = None
    """Scheduling of the load client's threads: ``fifo``, ``nice -10`` or ``normal``, and the reason for no better
    one. None where no load was sent, and in older records."""
    started_at: str | None = None
    """UTC, ISO 8601; the only wall-clock time of a run."""
    times: RunTimes = RunTimes()
    """Beginnings of its parts."""
    clock: Clock = "host"
    """Clock of the engine's steps."""
    steps_cover: Literal["step", "sampler"] = "step"
    """Extent of ``dur_ns`` of the steps: all of the step, or the sampler alone. Of such steps neither the duration
    nor the moment is known, and ``start_ns`` only keeps their order."""
    time_scale: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    """Virtual seconds per wall second; a duration seen by the client is multiplied by it to compare with steps."""
    floor_ns: Size | None = None
    """Least time of a step by its FLOPs and bytes, if all steps are the same forward pass; None where the peaks of
    the device are unknown."""
    num_sent: Count | None = None
    """Requests of the load that were sent."""
    num_completed: Count | None = None
    """Requests that succeeded."""
    num_failed: Count | None = None
    """Requests that failed."""
    warnings: tuple[ResultWarning, ...] = ()
    """Limits on the use of the run."""
    failure: RunFailure | None = None
    """The failure of a run in state ``failed``."""
    redactions: dict[str, int] = {}
    """Secrets that were replaced in what the server wrote, by name of the variable or kind of the key."""
    files: dict[str, FileDigest] = {}
    """The other files of the run by name, as they were when it ended; empty until then and in older records."""

    @property
    def has_ended(self) -> bool:
        """True if it came to its own end, for better or worse; a run that was cut off is measured again."""
        return self.state in ENDED and (self.failure is None or self.failure.cause != INTERRUPTED)

    @property
    def node_name(self) -> str | None:
        """Name of the node that did the run; of the host in older records, None where neither is known."""
        return self.host if self.node is None else self.node.name

    @property
    def is_simulated(self) -> bool:
        """True if neither a server nor a client ran: the requests have virtual times like the steps."""
        return self.clock == "virtual" and not self.argv

    @property
    def clock_factor(self) -> float:
        """Seconds of the engine's clock per second of the client's: ``time_scale`` on a virtual clock, else 1."""
        return self.time_scale if self.clock == "virtual" else 1.0

    @property
    def times_whole_steps(self) -> bool:
        """True if ``dur_ns`` of a step is the time of all of it."""
        return self.steps_cover == "step"
