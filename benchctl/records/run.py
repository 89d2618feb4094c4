"""Record types: what a result directory holds, line by line.

All are frozen msgspec structs. ``None`` means *unknown*, never zero, and is left out of the JSON; times are
integer nanoseconds of the measuring host's monotonic clock unless the field says otherwise.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

RunState: TypeAlias = Literal["planned", "running", "done", "failed", "suspect"]
Clock: TypeAlias = Literal["host", "device", "virtual"]
StopMode: TypeAlias = Literal["forced", "natural", "replay-natural"]
"""What ends an output: its planned length, the model, or the length that the baseline's model gave it."""
Phase: TypeAlias = Literal["prefill", "decode", "mixed"]
Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A number that has its place in a column of 64 bits; a line with a larger one cannot be read."""
Cell: TypeAlias = dict[str, str | int | float | bool | None]
"""One point of the sweep: a value for each swept factor. Empty for the baseline."""


FOREIGN_GPU_PROCESS = "foreign-gpu-process"
"""Code of the warning that another program computed on a device of the run."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all records share: frozen, keyword-only, absent where unknown."""


class ResultWarning(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Doubt as data: attached to a result, printed as a footnote, kept in the JSON.

    ``code`` is stable and machine-readable (``gpu-sampler-missing``); ``message`` says what it means for the
    numbers; ``where`` names the run, file or metric it is about.
    """

    code: str
    message: str
    where: str | None = None


class Message(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One chat message."""

    role: str
    content: str


class PreparedRequest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One line of ``requests.jsonl`` at the top of a result directory: what will be asked, and when.

    The same for every variant and cell; byte-identical for the same profile and seed. Exactly one of
    ``messages`` (chat) and ``prompt`` (completion) is set. ``max_tokens`` is the limit of each of the ``n``
    choices; with ``ignore_eos`` it is their exact length.
    """

    request_id: str
    index: int
    arrival_ns: int
    """Offset from the start of the load. 0 for all requests of a closed loop, which send when a slot frees."""
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    prompt_tokens: int
    """Length of the prompt as known or estimated by the workload; the engine's own count is in ``usage``."""
    max_tokens: int
    ignore_eos: bool = False
    n: int = 1
    seed: int
    source: str
    """Where the prompt comes from, for example ``gsm8k/test:17``."""
    sample: int = 0
    """Which sample of the same prompt this is, when ``n`` samples are sent as ``n`` requests."""
    answer: str | None = None
    """Gold answer where the dataset has one."""
    natural_tokens: int | None = None
    """Length at which the baseline's model ended its answer, where that was measured beforehand."""


class ChoiceRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What arrived for one choice of one request.

    ``chunk_ns[i]`` is the arrival of the i-th event that carried output of this choice; ``chunk_tokens[i]``
    the number of tokens in it, where the engine says so. Chunks are not tokens: count from usage. Chunks that came
    out of one read share its time, which is that of its newest bytes: for all but the last of them it is an upper
    bound.
    """

    index: int
    chunk_ns: tuple[int, ...] = ()
    chunk_late_ns: tuple[int, ...] | None = None
    """By how much later than ``chunk_ns`` the client read each chunk, where the kernel stamped the arrivals."""
    chunk_tokens: tuple[int, ...] | None = None
    chunk_chars: tuple[int, ...] | None = None
    """Characters (code points) of ``text`` in each chunk; their sum is its length. None in older records."""
    output_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""


class RequestError(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request failed.

    ``kind`` is a class of its own for each way: ``connect-refused``, ``connect-timeout``, ``connect-failed``
    (anything else before there was a connection), ``first-token-timeout``, ``between-tokens-timeout``,
    ``total-timeout``, ``reset`` and ``early-close`` (the connection broke, or ended before the answer did),
    ``http-status``, ``malformed-http``, ``malformed-stream``, ``server-error`` (an error event in the stream),
    ``wrong-length`` (not as many tokens as ``ignore_eos`` demands), ``cancelled``.
    """

    kind: str
    message: str
    status: int | None = None


class RequestRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a run's ``requests.jsonl``: one request as the client saw it.

    Failed requests are lines like any other and stay in every denominator. Nothing is sent twice, but for a request
    that met an idle connection in the moment in which the server closed it (``is_resent``).
    """

    request_id: str
    index: int
    is_warmup: bool = False
    scheduled_ns: int
    """When it was to leave: at its time by the plan, or when it had a slot where there is no plan."""
    slot_free_ns: int | None = None
    """When its slot became free: with the last byte of the stream that had it before. None for one that waited for
    no slot, and in results of before this was recorded."""
    connected_ns: int | None = None
    """When its connection was open: before ``sent_ns``, because connections are made ahead or used again."""
    sent_ns: int | None = None
    """When its first byte was handed to the kernel; ``sent_ns - scheduled_ns`` is the send lag."""
    done_ns: int | None = None
    stamps: Literal["kernel", "loop", "whole"] = "loop"
    """Who took the time of the chunks: the kernel as their bytes reached this host, or the client as it read
    them. ``whole``: the answer came in one piece, of which only ``done_ns`` is known."""
    route: Literal["stream", "httpx"] = "stream"
    """Through the transport made for streams, or one of httpx's own, which costs more and stamps later."""
    num_redirects: int = 0
    """How often the server sent the request on to another place."""
    is_resent: bool = False
    """Whether it was sent again: the server closed an idle connection before a byte of the answer had come back."""
    status: int | None = None
    choices: tuple[ChoiceRecord, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """From ``usage``: summed over the choices of this request, once per request."""
    cached_tokens: int | None = None
    natural_tokens: int | None = None
    """As the request set says it, so that the records of a run can be read by themselves."""
    error: RequestError | None = None


class ClockOffset(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The wall clock less the monotonic clock, and from when on it was so."""

    t_ns: int
    realtime_less_monotonic_ns: int


class ClientSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One line of ``client.jsonl``: how one process of the load generator did since its last line.

    ``loop_lag_ns`` is by how much later than due its event loop woke for this sample; ``cpu_ns`` the processor time
    of the process until now.
    """

    t_ns: int
    worker: int = 0
    loop_lag_ns: int
    cpu_ns: int
    num_open: int
    """Requests open at ``t_ns``."""
    offset: ClockOffset | None = None
    """Where it is new: in the first sample, and after somebody set the wall clock."""


class StepRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One line of ``steps.jsonl``: one forward iteration of the engine over a batch.

    ``sections_ns`` are parts of ``dur_ns`` by name; ``SECTION_PARENT`` says which lie inside which.
    ``clock`` says what ``dur_ns`` is: host time (asynchronous unless the engine synchronises), device time,
    or the virtual time of a simulator. ``context_tokens`` is the sum of contexts over the batch.
    """

    step: Int64
    start_ns: Int64
    dur_ns: Int64
    clock: Clock
    phase: Phase
    is_warmup: bool = False
    num_seqs: Int64
    num_prefill_tokens: Int64 | None = None
    num_decode_tokens: Int64 | None = None
    context_tokens: Int64 | None = None
    output_tokens: Int64 | None = None
    is_greedy: bool | None = None
    guided_rows: Int64 | None = None
    """Rows whose candidates a value model scored in this step."""
    candidates: Int64 | None = None
    """Candidates scored, summed over the guided rows."""
    fused: bool | None = None
    draft_tokens: Int64 | None = None
    accepted_tokens: Int64 | None = None
    preempted: Int64 | None = None
    kv_used_blocks: Int64 | None = None
    value_prefill_tokens: Int64 | None = None
    """Prompt tokens that the value model prefilled in this step."""
    value_extend_tokens: Int64 | None = None
    """Tokens by which the value model extended its prefixes in this step."""
    sections_ns: dict[str, Int64] = {}


SECTION_PARENT: dict[str, str | None] = {
    "schedule": None,
    "model_forward": None,
    "sampler_total": None,
    "pre_lvm": "sampler_total",
    "lvm_apply_outer": "sampler_total",
    "sample": "sampler_total",
    "lvm_build_pending": "lvm_apply_outer",
    "lvm_forward": "lvm_apply_outer",
    "lvm_apply_guidance": "lvm_apply_outer",
    "value_model_load": "lvm_apply_outer",
}
"""Parent of each known section; ``None`` is the step itself. Children of one parent are disjoint, so the
parent less the sum of its children is the time not named. The LenVM names are those of the fork's timing log
without ``t_`` and ``_ms``."""


class GpuSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One line of ``gpu.jsonl``: one reading of one visible device."""

    t_ns: int
    index: int
    uuid: str | None = None
    source: Literal["nvml", "nvidia-smi"]
    utilization_frac: float | None = None
    memory_used_bytes: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    """Counter of the device since its driver was loaded; differences are energy."""
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] | None = None


class HostSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One line of ``host.jsonl``: the server's process tree and the client, as psutil sees them."""

    t_ns: int
    server_cpu_cores: float | None = None
    """Cores kept busy since the previous sample (1.5 = one and a half cores)."""
    server_rss_bytes: int | None = None
    server_processes: int | None = None
    client_cpu_cores: float | None = None
    host_cpu_frac: float | None = None
    memory_available_bytes: int | None = None


class PrometheusSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One line of ``prometheus.jsonl``: the server's counters and gauges at one moment, without histogram buckets.

    Keys are series as the server writes them: ``name`` or ``name{label="value"}``.
    """

    t_ns: int
    values: dict[str, float]


class RunTimes(Record, frozen=True, kw_only=True, omit_defaults=True):
    """When the phases of one run began, on the client's monotonic clock."""

    launch_ns: int | None = None
    ready_ns: int | None = None
    warmup_start_ns: int | None = None
    first_send_ns: int | None = None
    last_token_ns: int | None = None
    stop_ns: int | None = None


class RunFailure(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Why a run failed, with the end of the server's log."""

    cause: str
    message: str
    log_tail: str = ""


class FileDigest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What a file held when nothing more was to be written to it, and the stamp that it had then."""

    sha256: str
    size_bytes: int
    mtime_ns: int


class RunRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """``run.json``: one fresh server and one workload.

    ``clock`` is the clock of the engine's steps; with a virtual one, ``time_scale`` is virtual seconds per
    wall second, and a duration seen by the client is multiplied by it to compare with the steps.
    """

    schema_version: int
    index: int
    run_id: str
    block: int
    position: int
    """Place within the block, from 0."""
    variant: str
    cell: Cell = {}
    state: RunState = "planned"
    attempt: int = 0
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}
    engine: str | None = None
    engine_version: str | None = None
    effective_config: dict[str, Any] = {}
    """What the server says of itself, flat: one key per setting."""
    host: str | None = None
    """Name of the machine that did the run; None in older records."""
    client_priority: str | None = None
    """How the load client's threads were scheduled: ``fifo``, ``nice -10`` or ``normal``, and why not better. None
    where no load went out, and in older records."""
    started_at: str | None = None
    """UTC, ISO 8601; the only wall-clock time of a run."""
    times: RunTimes = RunTimes()
    clock: Clock = "host"
    steps_cover: Literal["step", "sampler"] = "step"
    """What ``dur_ns`` of the steps is the time of: all of the step, or the sampler alone. Of such steps neither the
    duration nor the moment is known, and ``start_ns`` only keeps their order."""
    time_scale: float = 1.0
    num_sent: int | None = None
    num_completed: int | None = None
    num_failed: int | None = None
    warnings: tuple[ResultWarning, ...] = ()
    failure: RunFailure | None = None
    files: dict[str, FileDigest] = {}
    """The other files of the run by name, as they were when it ended; empty until then and in older records."""

    @property
    def times_whole_steps(self) -> bool:
        """Whether ``dur_ns`` of a step is how long all of it took."""
        return self.steps_cover == "step"


class PlannedRun(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of ``plan.json``."""

    index: int
    run_id: str
    block: int
    position: int
    variant: str
    cell: Cell = {}


class Plan(Record, frozen=True, kw_only=True, omit_defaults=True):
    """``plan.json``: the ordered runs of an experiment."""

    schema_version: int
    runs: tuple[PlannedRun, ...]


class GitState(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Commit of the code that measured, and whether the work tree differed from it."""

    sha: str
    is_dirty: bool


class HostInfo(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The measuring machine."""

    hostname: str
    platform: str
    python: str
    cpu_model: str | None = None
    num_cores: int | None = None
    memory_bytes: int | None = None


class GpuInfo(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One visible device at the start of the experiment."""

    index: int
    name: str
    uuid: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None


class HalfWidth(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How well one metric of one cell was known at a look; ``num_blocks`` are those that count."""

    cell: str
    metric: str
    num_blocks: int
    half_width_frac: float | None = None
    """Half the interval of the ratio, as a fraction; unknown below six blocks."""


class Look(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One look at what was measured so far; ``num_blocks`` had been run by then, good or bad."""

    num_blocks: int
    half_widths: tuple[HalfWidth, ...]
    is_precise: bool
    """Every half-width was within the precision: the experiment ended here."""


class StoppingRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A rule by which an experiment may end before its last block, and what became of it.

    All but ``looks`` is written before the first run. Whoever estimates from such an experiment owes the correction
    for all of ``look_blocks``, whether or not it ended early.
    """

    precision_frac: float
    confidence: float
    """Of the intervals at each look: 1 - 0.05 / number of looks."""
    look_blocks: tuple[int, ...]
    """After how many blocks there is a look; the last is the most that would be run."""
    looks: tuple[Look, ...] = ()
    """Those that were taken."""

    @property
    def ended_after(self) -> int | None:
        """Blocks after which the rule ended the experiment before its last one; None where it did not."""
        ended = [look.num_blocks for look in self.looks if look.is_precise]
        return ended[0] if ended and ended[0] < self.look_blocks[-1] else None


class Imported(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Where results come from that benchctl did not measure; the files themselves lie beside its records."""

    tool: str
    source: str
    sha256: dict[str, str]
    """Of each file that was read, by its name in the source."""
    revisions: tuple[str, ...] = ()
    """Revisions of the server that fit what it wrote."""


class Manifest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """``manifest.json``: what was measured, by whom, with what. ``state`` is that of the whole experiment."""

    schema_version: int
    state: RunState
    profile: str
    profile_sha256: str
    """Of the resolved profile: resuming demands the same."""
    request_set_sha256: str
    dataset: str
    """The request set's true source, for example ``gsm8k/test`` or ``generated``."""
    seed: int
    blocks: int
    baseline: str
    """Name of the variant that the others are compared with."""
    stop: StopMode
    lengths_from: str | None = None
    """Result directory in which the natural lengths of the request set were measured."""
    stopping: StoppingRecord | None = None
    """The rule that may end the experiment early; None where the number of blocks is fixed."""
    engine: str
    label: str | None = None
    created_at: str
    argv: tuple[str, ...]
    benchctl_version: str
    versions: dict[str, str] = {}
    git: GitState | None = None
    host: HostInfo
    gpus: tuple[GpuInfo, ...] = ()
    imported: Imported | None = None
    """None where benchctl measured. Of imported results, ``host`` and ``versions`` are unknown."""
    warnings: tuple[ResultWarning, ...] = ()
