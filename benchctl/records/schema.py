"""The form of all records, and those that others consist of: steps, samples, the machine that measured, files.

Records are frozen structs, the lines and documents of a result directory. ``SCHEMA_VERSION`` is the version of all.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from benchctl.errors import RecordError, SchemaVersionError
from benchctl.untrusted.text import visible_value

SCHEMA_VERSION: Final = 3
_LAST_VERSION: Final = 9_999
"""Beyond it a version is none."""


def check_version(document: Mapping[str, Any], path: Path) -> None:
    """Raise RecordError unless a document names a version of the schema, SchemaVersionError for another one."""
    version = document.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= _LAST_VERSION:
        raise RecordError(
            f"{path}: schema_version is {visible_value(version)}, not a positive whole number; "
            "this is not a file of a benchctl result directory, or it was edited"
        )
    if version != SCHEMA_VERSION:
        is_older = version < SCHEMA_VERSION
        remedy = "the benchctl that wrote it" if is_older else "the benchctl that wrote it, or upgrade this one"
        raise SchemaVersionError(
            f"{path}: schema_version {visible_value(version)} is {'older' if is_older else 'newer'} than "
            f"{SCHEMA_VERSION}, the only one that this benchctl reads; read it with {remedy}"
        )


RunState: TypeAlias = Literal["planned", "running", "done", "failed", "suspect"]
ExperimentState: TypeAlias = Literal["planned", "running", "done", "failed", "suspect", "interrupted"]
"""``interrupted``: Ctrl-C or SIGTERM ended it; directories of older versions say ``failed``."""
Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A number that fits into a column of 64 bits; a line with a larger one cannot be read."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""A number of things, such as tokens, rows or requests. The sum over the steps of a log fits into 64 bits."""
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""Bytes, hertz or nanoseconds without a bound of their own."""
MomentNs: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
"""A time on any clock, until the year 2116 on one that counts from 1970; below 0 before the beginning of an import.
Differences fit into 64 bits."""
DurationNs: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=86_400 * 10**9)]
"""A duration of a step or a part of it: at most a day."""
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
"""A measured quantity that is never negative."""
RunId: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")]
"""All that ``run_directory_name`` makes: one plain component of a path, on any system."""
FileName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[^/\\\x00]{1,255}\Z")]
"""One component of a path on any system."""
FilePath: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A((?!\.{1,2}(/|\Z))[^/\\\x00]{1,255}(/|\Z)){1,16}\Z")]
"""A path below a directory, with slashes."""
Cell: TypeAlias = dict[str, str | Int64 | float | bool | None]
"""One point of the sweep: a value for each swept factor. Empty for the baseline."""
FOREIGN_GPU_PROCESS = "foreign-gpu-process"
"""Code of the warning that another program computed on a device of the run."""
GPU_UNREADABLE = "gpu-unreadable"
"""Code of the warning that a visible device cannot be read."""
GPU_LOST = "gpu-lost"
"""Code of the warning that a device of the run stopped answering."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The form of all records: frozen, keyword-only, absent where unknown. None is part of a cycle."""


class Document(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A record that is a file of its own, and names the version of its form."""

    schema_version: int
    """Version of the result format."""


class ResultWarning(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A limit on the use of a result: attached to it, printed as a footnote, kept in the JSON."""

    code: str
    """Stable name for programs, such as ``gpu-sampler-missing``."""
    message: str
    """Consequence for the numbers, and remedy."""
    where: str | None = None
    """Run, file or metric that it concerns."""


Clock: TypeAlias = Literal["host", "device", "virtual"]
StepPhase: TypeAlias = Literal["prefill", "decode", "mixed"]
MOST_SECTIONS: Final = 256
"""Sections of a step: each that any step of a log has is a column of all its steps."""
MOST_POSITIONS: Final = 256
"""Positions of a draft, which are columns as well."""


class StepRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One forward iteration of the engine over a batch."""

    step: Count
    """Number of the step, ascending."""
    start_ns: MomentNs
    """Start, on ``clock``."""
    dur_ns: DurationNs
    """Duration, on ``clock``; see ``steps_cover`` of the run."""
    clock: Clock
    """``host`` time (asynchronous unless the engine synchronises), ``device`` time, or the ``virtual`` time of a
    simulator."""
    phase: StepPhase
    """Kind of tokens in the batch."""
    is_warmup: bool = False
    """Whether it served the warm-up, which no metric counts."""
    num_seqs: Count
    """Sequences in the batch."""
    num_prefill_tokens: Count | None = None
    """Prompt tokens computed."""
    num_decode_tokens: Count | None = None
    """Tokens computed for decoding sequences."""
    context_tokens: Count | None = None
    """Sum of the contexts over the batch, after the step."""
    output_tokens: Count | None = None
    """Tokens that clients get from this step."""
    is_greedy: bool | None = None
    """Whether every row takes the most probable token."""
    guided_rows: Count | None = None
    """Rows whose candidates a value model scored."""
    candidates: Count | None = None
    """Candidates scored, summed over the guided rows."""
    fused: bool | None = None
    """Whether the value model extended its prefixes and scored in one pass."""
    drafts: Count | None = None
    """Sequences for which tokens were drafted."""
    draft_tokens: Count | None = None
    """Tokens proposed by speculative decoding."""
    accepted_tokens: Count | None = None
    """Proposed tokens that were accepted."""
    accepted_by_position: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_POSITIONS)] | None = None
    """Sequences whose first, second, … draft token was accepted; their sum is ``accepted_tokens``."""
    preempted: Count | None = None
    """Sequences that lost their key-value memory and start again."""
    kv_used_blocks: Count | None = None
    """Blocks of key-value memory in use."""
    value_prefill_tokens: Count | None = None
    """Prompt tokens that the value model prefilled."""
    value_extend_tokens: Count | None = None
    """Tokens by which the value model extended its prefixes."""
    value_reuse_tokens: Count | None = None
    """Tokens by which prefixes grew without being computed: drawn candidates whose keys and values were kept."""
    value_replayed: bool | None = None
    """Whether every pass that scored repeated a recorded one."""
    value_recordings: Count | None = None
    """Passes of the value model that were recorded in this step, because their sizes had not been foreseen."""
    sections_ns: Annotated[dict[str, DurationNs], msgspec.Meta(max_length=MOST_SECTIONS)] = {}
    """Parts of ``dur_ns`` by name; see *Sections of a step*."""


SECTION_PARENT: dict[str, str | None] = {
    "schedule": None,
    "draft": None,
    "backfill": None,
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


class ClockOffset(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The wall clock less the monotonic clock, from one moment on."""

    t_ns: MomentNs
    """The moment."""
    realtime_less_monotonic_ns: MomentNs
    """Nanoseconds since 1970, less those of the monotonic clock."""


class ClientSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Health of one process of the load generator since its last sample."""

    t_ns: MomentNs
    """Time of the sample."""
    worker: Count = 0
    """Number of the process."""
    loop_lag_ns: MomentNs
    """Delay of its event loop: it woke for this sample so much later than due."""
    cpu_ns: Size
    """Processor time of the process until now."""
    num_open: Count
    """Requests open at ``t_ns``."""
    offset: ClockOffset | None = None
    """The wall clock, if it is new: in the first sample, and after it was set."""


class GpuSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One reading of one visible device."""

    t_ns: MomentNs
    """Time of the sample."""
    index: Count
    """Number of the device."""
    uuid: str | None = None
    """Identity of the device."""
    source: Literal["nvml", "nvidia-smi"]
    """Program that read it."""
    utilization_frac: Amount | None = None
    """Share of time in which a kernel ran, 0 to 1."""
    memory_used_bytes: Size | None = None
    """Device memory in use, of all programs."""
    power_w: Amount | None = None
    """Power draw in watts."""
    energy_j: Amount | None = None
    """Counter of the device since its driver was loaded, in joules; differences are energy."""
    sm_clock_hz: Size | None = None
    """Clock of the processors."""
    memory_clock_hz: Size | None = None
    """Clock of the memory."""
    temperature_c: float | None = None
    """Temperature in degrees Celsius."""
    throttle_reasons: tuple[str, ...] | None = None
    """Reasons for which the device limits its clocks, in NVIDIA's names."""


class HostSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The server's process tree and the client, as psutil sees them."""

    t_ns: MomentNs
    """Time of the sample."""
    server_cpu_cores: Amount | None = None
    """Cores kept busy by the server since the previous sample (1.5 = one and a half cores)."""
    server_rss_bytes: Size | None = None
    """Resident memory of the server's processes."""
    server_processes: Count | None = None
    """Number of the server's processes."""
    client_cpu_cores: Amount | None = None
    """Cores kept busy by the client since the previous sample."""
    host_cpu_frac: Amount | None = None
    """Share of all cores that were busy, 0 to 1."""
    memory_available_bytes: Size | None = None
    """Memory that programs can still have without swapping."""


class PrometheusSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The server's counters and gauges at one moment, without histogram buckets."""

    t_ns: MomentNs
    """Time of the sample."""
    values: dict[str, float]
    """Values by series as the server writes them: ``name`` or ``name{label="value"}``."""


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


class GpuInfo(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One visible device."""

    index: Count
    """Number of the device on its host."""
    name: str
    """Name of the device."""
    uuid: str | None = None
    """Identity of the device."""
    memory_bytes: Size | None = None
    """Device memory."""
    driver: str | None = None
    """Version of the driver."""


class NodeGpu(GpuInfo, frozen=True, kw_only=True, omit_defaults=True):
    """One device that the run's server could see, with what limits its speed."""

    max_sm_clock_mhz: Count | None = None
    """Highest clock of the multiprocessors."""
    max_memory_clock_mhz: Count | None = None
    """Highest clock of the memory."""
    power_limit_w: float | None = None
    """Power limit in force."""
    numa_node: Count | None = None
    """NUMA node to which the device is attached."""


class NodeInfo(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The machine of one run."""

    name: str
    """Name of the node in its cluster, or of the host."""
    hostname: str
    """Name that the machine itself has."""
    job: str | None = None
    """Job of the scheduler, such as ``slurm 17_3``."""
    platform: str | None = None
    """Operating system and its version."""
    cpu_model: str | None = None
    """Name of the processor."""
    cores: str | None = None
    """Cores that benchctl could use, such as ``0-7,16-23``."""
    num_numa_nodes: Count | None = None
    """NUMA nodes of the machine."""
    memory_bytes: Size | None = None
    """Main memory."""
    gpus: tuple[NodeGpu, ...] = ()
    """Devices that the server could see."""
    build: dict[str, str] = {}
    """Versions of the packages in the server's environment that can change a number; its CUDA version, if any."""


class FileDigest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Content and times of a file to which nothing more is written."""

    sha256: str
    """SHA-256 of the content, in hexadecimal digits."""
    size_bytes: Size
    """Size of the file."""
    mtime_ns: Int64
    """Time of its last change, nanoseconds since 1970."""


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
