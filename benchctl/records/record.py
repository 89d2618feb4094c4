"""The manifest and the plan of an experiment, its requests, and the record of one run.

Requests are as prepared before the load, and as the client saw them; a run is one fresh server and one workload.
"""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from benchctl.records.schema import (
    Amount,
    Cell,
    Clock,
    Count,
    Document,
    DurationNs,
    ExperimentState,
    FileDigest,
    FileName,
    GitState,
    GpuInfo,
    HostInfo,
    Imported,
    MomentNs,
    NodeInfo,
    Record,
    ResultWarning,
    RunId,
    RunState,
    Size,
)

StopMode: TypeAlias = Literal["forced", "natural", "replay-natural"]
"""End of an output: its planned length, the model's choice, or the length that the baseline's model gave it."""


class PlannedRun(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One run of the plan."""

    index: Count
    """Position in the plan, from 0."""
    run_id: RunId
    """Name of the run and of its directory."""
    block: Count
    """Block that the run belongs to, from 0."""
    position: Count
    """Position within the block, from 0."""
    variant: FileName
    """Variant to be served."""
    cell: Cell = {}
    """Value of each swept factor; empty for the baseline."""
    ladder: Annotated[tuple[Cell, ...], msgspec.Meta(max_length=64)] = ()
    """Load points that its server gets, in this order; empty where it gets one."""


class Plan(Document, frozen=True, kw_only=True, omit_defaults=True):
    """The ordered runs of an experiment."""

    runs: tuple[PlannedRun, ...]
    """Runs in the order of execution."""

    def num_blocks_of(self, done: Collection[str]) -> int:
        """Number of blocks all of whose runs are among ``done``, by ``run_id``."""
        return len({run.block for run in self.runs} - {run.block for run in self.runs if run.run_id not in done})


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
    ends_for: Literal["verdict", "futility"] | None = None
    """``verdict``: every deciding metric had one, ``futility``: none that was open was likely to get one. The
    experiment ended here; None where it went on, or ended for its precision."""
    reason: str | None = None
    """What was seen, where the rule waits for a verdict."""


class StoppingRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The rule by which an experiment may end before its last block, and its looks.

    All but ``looks`` is written before the first run. An estimate from such an experiment owes the correction for
    all of ``look_blocks``, whether or not it ended early.
    """

    precision_frac: Amount | None = None
    """Half-width at which the experiment ends, as a fraction; None where it ends for a verdict."""
    confidence: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    """Of the intervals at each look but the last."""
    last_confidence: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.95
    """Of the intervals at the last look."""
    look_blocks: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    """Blocks after which there is a look; the last is the most that would be run."""
    looks: tuple[Look, ...] = ()
    """Looks so far."""

    @property
    def ended_after(self) -> int | None:
        """Blocks after which the rule ended the experiment before its last one; None where it did not."""
        ended = [look.num_blocks for look in self.looks if look.is_precise or look.ends_for is not None]
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


class LoadsChoice(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The number of loads of each server that ``loads_per_server: auto`` chose from the first blocks, and why.

    It depends on scatter and cost alone, never on the sign or the size of a change.
    """

    from_block: Count
    """First block with so many loads; servers of blocks before it got the number of the pilot."""
    num_loads: Count
    """Loads of each server."""
    scatter: dict[str, tuple[Amount, Amount]]
    """Standard deviation of the logarithm between servers, and between the loads of one, by metric."""
    start_s: Amount
    """Seconds of all of a run but its loads."""
    load_s: Amount
    """Seconds of one load."""
    reason: str
    """The choice in words."""


class RequestSet(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One of several request sets of an experiment: load points with other lengths or rates have their own."""

    cell: Cell
    """Load factors in which it differs from the other sets, with its values."""
    file: FileName
    """File of the result directory that holds it."""
    sha256: str
    """SHA-256 of the file."""


class Manifest(Document, frozen=True, kw_only=True, omit_defaults=True):
    """The experiment: its profile, request set, machine and state."""

    state: ExperimentState
    """State of the whole experiment."""
    profile: str
    """Name of the profile."""
    profile_sha256: str
    """SHA-256 of the resolved profile: resuming demands the same."""
    request_set_sha256: str
    """SHA-256 of ``requests.jsonl``, the first of several sets."""
    request_sets: tuple[RequestSet, ...] = ()
    """All request sets, where load points have several; empty for one."""
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
    loads: LoadsChoice | None = None
    """The number of loads per server that was chosen while measuring; None where the profile states it."""
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
    def is_simulated(self) -> bool:
        """True for runs in virtual time, without a server and a client."""
        return any(warning.code == "simulated" for warning in self.warnings)

    @property
    def all_sets(self) -> tuple[RequestSet, ...]:
        """All request sets, also where there is one."""
        only = RequestSet(cell={}, file="requests.jsonl", sha256=self.request_set_sha256)
        return self.request_sets or (only,)

    @property
    def directory_name(self) -> str:
        """Name of its result directory where nobody chose another: ``<utc>-<hash8>``."""
        utc = self.created_at.replace("-", "").replace(":", "")
        return f"{utc}-{self.profile_sha256[:8]}"


ESTIMATE: Final = "estimate"
"""Source of a number of prompt tokens that no tokenizer counted."""
SERVER: Final = "server"
"""Source of a number of prompt tokens that a server counted before the load."""


class Message(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One chat message."""

    role: str
    """``system``, ``user`` or ``assistant``."""
    content: str
    """Text of the message."""


class PreparedRequest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One prepared request: prompt, limits and arrival.

    The same for every variant and cell; byte-identical for the same profile and seed. Exactly one of
    ``messages`` (chat) and ``prompt`` (completion) is set.
    """

    request_id: str
    """Identity, the same in every run."""
    index: Count
    """Position in the request set, from 0."""
    arrival_ns: Size
    """Offset from the start of the load. 0 for all requests of a closed loop, which sends when a slot is free."""
    messages: tuple[Message, ...] | None = None
    """Prompt as a chat."""
    prompt: str | None = None
    """Prompt as plain text."""
    prompt_tokens: Count
    """Length of the prompt as counted or estimated before the load; the engine's own count is in ``usage``."""
    prompt_tokens_from: str = ESTIMATE
    """Source of ``prompt_tokens``: ``tokenizer <sha256>`` of a file, ``server``, or ``estimate``."""
    max_tokens: Count
    """Limit in tokens of each choice; with ``ignore_eos`` their exact length."""
    ignore_eos: bool = False
    """Whether each choice has exactly ``max_tokens``, wherever the model would end it."""
    n: Count = 1
    """Choices asked for in this one request."""
    seed: int
    """Seed of the sampler, different for each request."""
    source: str
    """Dataset and row of the prompt, for example ``gsm8k/test:17``."""
    sample: Count = 0
    """Number of this sample of its prompt, when ``n`` samples are sent as ``n`` requests."""
    answer: str | None = None
    """Gold answer, if the dataset has one."""
    session: str | None = None
    """Conversation of which the prompt is a turn, if the dataset names it; without ``turn`` sending does not depend
    on it."""
    turn: Count | None = None
    """Position in that conversation, from 0, where its turns are sent in order; they are neighbours in the set."""
    think_ns: Size = 0
    """From the last byte of the answer before it until a later turn is due."""
    shared_tokens: Count = 0
    """Tokens at the beginning of the prompt that a prefix cache has by plan; of a turn the one before it, and its
    answer where that is the server's."""
    shared_chars: Count = 0
    """Characters at its beginning that are these tokens, where other prompts begin with them, too."""
    natural_tokens: Count | None = None
    """Length at which the baseline's model ended its answer, if that was measured beforehand."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared request in an engine's dialect, ready to be sent. No file holds it."""

    request: PreparedRequest
    path: str
    headers: Mapping[str, str]
    body: bytes
    """JSON."""
    is_warmup: bool = False
    secrets: Mapping[str, str] = {}
    """Values in the headers that must never be recorded, by the variable that holds each."""


class ChoiceRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one request, chunk by chunk.

    Chunks are not tokens: count from usage. Chunks that came out of one read share its time, which is that of its
    newest bytes: for all but the last of them it is an upper bound.
    """

    index: Count
    """Number of the choice, from 0."""
    chunk_ns: tuple[MomentNs, ...] = ()
    """Arrival of each event that carried output of this choice."""
    chunk_late_ns: tuple[DurationNs, ...] | None = None
    """Time from ``chunk_ns`` until the client read the chunk, if the kernel stamped the arrivals."""
    chunk_tokens: tuple[Count, ...] | None = None
    """Tokens in each chunk, if the engine reports them."""
    chunk_chars: tuple[Count, ...] | None = None
    """Characters (code points) of ``text`` in each chunk; their sum is its length. None in older records."""
    output_tokens: Count | None = None
    """Tokens of this choice, if the engine reports them."""
    finish_reason: str | None = None
    """``stop``, ``length`` or another word, as the server says it; at most 64 characters."""
    text: str = ""
    """The answer."""


class RequestError(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The failure of a request.

    ``kind`` is a class of its own for each way: ``connect-refused``, ``connect-timeout``, ``connect-failed``
    (anything else before there was a connection), ``too-many-open-files`` and ``out-of-memory`` (of the client),
    ``first-token-timeout``, ``between-tokens-timeout``, ``total-timeout``, ``reset`` and ``early-close`` (the
    connection broke, or ended before the answer did), ``http-status``, ``malformed-http``, ``malformed-stream``,
    ``server-error`` (an error event in the stream), ``unfinished`` (the stream said that it was over before each
    choice had a finish reason), ``finish-error``, ``finish-abort``, ``finish-cancelled``,
    ``finish-content-filter`` and ``finish-timeout`` (the finish reason says that the answer is none),
    ``wrong-length`` (not as many tokens as ``ignore_eos`` demands), ``unrequested-choice``, ``oversized-head``,
    ``oversized-line`` and ``oversized-answer`` (more than any answer to the request holds: it was not read to its
    end), ``cancelled``.
    """

    kind: str
    """Class of the failure."""
    message: str
    """Text of the failure."""
    status: Count | None = None
    """HTTP status, if the server sent one; of an error event, the code in it."""


class RequestRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One request as the client saw it.

    Failed requests are lines like any other and stay in every denominator. Nothing is sent twice, but for a request
    that met an idle connection in the moment in which the server closed it (``is_resent``).
    """

    request_id: str
    """Identity of the prepared request."""
    index: Count
    """Position in the request set, from 0."""
    is_warmup: bool = False
    """Whether it belongs to the warm-up, which no metric counts."""
    scheduled_ns: MomentNs
    """Planned time of sending; for a request without one, the time at which it had a slot."""
    slot_free_ns: MomentNs | None = None
    """Time at which its slot became free: with the last byte of the stream that had it before. None for one that
    waited for no slot, and in older records."""
    connected_ns: MomentNs | None = None
    """Time at which its connection was open: before ``sent_ns``, as connections are made ahead or used again."""
    sent_ns: MomentNs | None = None
    """Time at which its first byte was handed to the kernel; ``sent_ns - scheduled_ns`` is the send lag."""
    done_ns: MomentNs | None = None
    """Time of the last byte of the answer, or of the failure."""
    stamps: Literal["kernel", "loop", "whole"] = "loop"
    """Source of the chunks' times: the kernel as their bytes reached this host, or the client as it read them.
    ``whole``: the answer came in one piece, of which only ``done_ns`` is known."""
    route: Literal["stream", "httpx"] = "stream"
    """The transport made for streams, or one of httpx's own, which costs more and stamps later."""
    is_resent: bool = False
    """Whether it was sent again: the server closed an idle connection before a byte of the answer had come back."""
    status: Count | None = None
    """HTTP status."""
    choices: tuple[ChoiceRecord, ...] = ()
    """Answers, one for each of ``n``."""
    prompt_tokens: Count | None = None
    """From ``usage``: tokens of the prompt."""
    completion_tokens: Count | None = None
    """From ``usage``: summed over the choices of this request, once per request."""
    cached_tokens: Count | None = None
    """From ``usage``: prompt tokens that the server found in its prefix cache."""
    natural_tokens: Count | None = None
    """Copy from the request set, so that the records of a run can be read by themselves."""
    turn: Count | None = None
    """Copy from the request set: position in its conversation, from 0; None for a request outside of any."""
    error: RequestError | None = None
    """The failure; None for a request that succeeded."""


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
    opening_ns: MomentNs | None = None
    """First request of a load whose first ones are warm-up (``load.begin: running``, ``load.discard``); None for
    others."""
    first_send_ns: MomentNs | None = None
    """First request of the load, of the first where there are several."""
    last_token_ns: MomentNs | None = None
    """Last token of the load, of the last where there are several."""
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

    @property
    def reason(self) -> str:
        """The cause, and the last error that the log names; without one the message."""
        errors = _ERROR.findall(self.log_tail)
        return f"{self.cause}: {errors[-1] if errors else self.message}"


class WarmupWave(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Times per token of one wave of the warm-up; None where nothing tells."""

    decode_ns: DurationNs | None = None
    """Of the steps that only decode, or from chunk to chunk: time over tokens."""
    prefill_ns: DurationNs | None = None
    """Of the steps with prompts, or until the first tokens: time over prompt tokens."""


class WarmupRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The waves after which a server counted as warm, or the bound was reached."""

    waves: tuple[WarmupWave, ...]
    """In the order in which they were sent."""
    source: Literal["steps", "client"]
    """Origin of the times: the engine's steps, or the client's chunks."""
    is_steady: bool
    """The last two agree within ``workload.warmup_tolerance``."""


class LoadRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One of several loads that a server got, judged by itself."""

    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    """Position among the loads, from 1: ``requests-2.jsonl`` holds the requests of the second."""
    cell: Cell = {}
    """Its load point; empty where all loads of the server are the same."""
    state: RunState = "planned"
    """``done`` if it counts; ``suspect`` or ``failed`` if it is left out; ``planned`` if it did not end."""
    opening_ns: MomentNs | None = None
    """First request of a load whose first ones are warm-up."""
    first_send_ns: MomentNs | None = None
    """First request."""
    last_token_ns: MomentNs | None = None
    """Last token."""
    num_sent: Count | None = None
    """Requests that were sent."""
    num_completed: Count | None = None
    """Requests that succeeded."""
    num_failed: Count | None = None
    """Requests that failed."""
    warnings: tuple[ResultWarning, ...] = ()
    """Limits on the use of the load."""
    failure: RunFailure | None = None
    """The failure of a load in state ``failed``."""


_ERROR: Final = re.compile(r"\b[\w.]*(?:Error|Exception): .*\S")


class RunRecord(PlannedRun, frozen=True, kw_only=True, omit_defaults=True):
    """One fresh server and one workload: the planned run, and what became of it."""

    schema_version: int
    """Version of the result format."""
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
    warmup: WarmupRecord | None = None
    """What the warm-up took until the server was warm; None where that was not asked, and in older records."""
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
    loads: Annotated[tuple[LoadRecord, ...], msgspec.Meta(max_length=64)] = ()
    """The loads of a server that got several; empty for one load."""
    num_sent: Count | None = None
    """Requests of the load that were sent, of all its loads where it has several."""
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
    files: dict[FileName, FileDigest] = {}
    """The other files of the run by name, as they were when it ended; empty until then and in older records."""

    @property
    def has_ended(self) -> bool:
        """True if it came to its own end, for better or worse; a run that was cut off is measured again."""
        # States of runs to which nothing more is written, unless they are measured again
        return self.state in {"done", "failed", "suspect"} and (
            self.failure is None or self.failure.cause != INTERRUPTED
        )

    @property
    def node_name(self) -> str | None:
        """Name of the node that did the run; of the host in older records, None where neither is known."""
        return self.host if self.node is None else self.node.name

    @property
    def is_virtual(self) -> bool:
        """True if the times of its steps were computed and not measured."""
        return self.clock == "virtual"

    @property
    def is_simulated(self) -> bool:
        """True if neither a server nor a client ran: the requests have virtual times like the steps."""
        return self.is_virtual and not self.argv

    @property
    def clock_factor(self) -> float:
        """Seconds of the engine's clock per second of the client's: ``time_scale`` on a virtual clock, else 1."""
        return self.time_scale if self.is_virtual else 1.0

    @property
    def times_whole_steps(self) -> bool:
        """True if ``dur_ns`` of a step is the time of all of it."""
        return self.steps_cover == "step"
