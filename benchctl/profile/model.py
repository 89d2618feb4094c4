"""The keys of a profile: closed pydantic models, in which an unknown key is an error.

Lengths are in tokens, rates in requests per second, durations in seconds.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, SerializeAsAny

from benchctl.profile.engine_table import ENGINES
from benchctl.profile.sections.cluster import ClusterSettings
from benchctl.profile.sections.engine_options import ServerOptions
from benchctl.profile.sections.guidance import Guidance
from benchctl.profile.sections.quantities import NAME_PATTERN, ReplicateCount, Seconds, Seed
from benchctl.profile.sections.request import RequestOptions
from benchctl.profile.sections.sampling import Sampling
from benchctl.profile.sections.section import Section
from benchctl.profile.sections.workload import Workload
from benchctl.records.manifest import StopMode

Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=128)]
MAX_VARIANTS = 128
Gate = Literal["throttling", "foreign-gpu-process", "failed-requests"]
FactorValue = str | int | float | bool | None
PriorityOption = Literal["auto", "none"]
if TYPE_CHECKING:
    EngineKind: TypeAlias = str
else:  # the same names for pydantic, which lists them in its errors
    EngineKind = Literal[tuple(ENGINES)]


class Control(Section):
    """The place of a variant in a ladder of controls; written by ``controls`` of another variant."""

    of: Name
    """Variant that the ladder leads to."""
    rung: Literal["flags", "idle", "neutral"]
    """Step of the ladder."""


class Variant(Section):
    """One named server configuration, as far as it differs from the profile's own settings."""

    description: str = ""
    """Purpose of the variant."""
    server: dict[str, Any] = {}
    """Engine options that replace those of the profile."""
    sampling: dict[str, Any] = {}
    """Sampling parameters that replace those of the profile."""
    request: dict[str, Any] = {}
    """Fields of requests that replace those of the profile."""
    guidance: Guidance | None = None
    """Guidance of its requests by the value model; a variant with this section is guided."""
    swept: bool | tuple[str, ...] = True
    """True: all factors of ``sweep`` apply; a list: those; false: none. The baseline is swept only with
    ``sweep_baseline``."""
    controls: bool = False
    """Also measures the steps from the baseline to this variant, as variants of their own: ``<name>-flags`` (its
    server options without a value model), ``<name>-idle`` (its server with the baseline's requests) and
    ``<name>-neutral`` (its guidance at value_scale 0)."""
    control: Control | None = None
    """The step of a ladder that this variant is."""


class Stopping(Section):
    """A rule, declared before the first run, that may end an experiment before its last block."""

    precision: float = Field(gt=0, lt=1)
    """Half the width of an interval, as a fraction (0.01 is one percent): the experiment ends when the interval of
    every primary metric in every cell is at most that wide. The sign of a change does not matter."""
    looks: int = Field(default=4, ge=1, le=20)
    """Number of looks at the data, evenly spaced from 6 blocks to the last. Their intervals have the confidence
    1 - 0.05 / looks, so that more looks make them wider."""


class Timeouts(Section):
    """Limits in seconds."""

    ready_s: Seconds = 600.0
    """From launch until the server answers."""
    request_s: Seconds = 600.0
    """From sending a request to its last token."""
    connect_s: Seconds = 10.0
    """For opening a connection."""
    first_token_s: Seconds | None = None
    """From sending a request to its first token; null: only ``request_s`` counts."""
    between_tokens_s: Seconds | None = None
    """From one token of a request to the next; null: only ``request_s`` counts."""
    stall_s: Seconds = 120.0
    """Without a token of any request, while requests are open, until the server counts as hung."""
    stop_s: Seconds = 10.0
    """From asking a server to end until it is killed."""


class ComparisonRules(Section):
    """The rules of the verdict, declared before the first run."""

    estimator: Literal["robust", "mean"] = "robust"
    """``robust`` gives outlying blocks little weight; ``mean`` gives all blocks the same."""


class Telemetry(Section):
    """Sampling rates in Hz; 0 switches a sampler off."""

    gpu_hz: float = Field(default=10.0, ge=0, le=100)
    """Readings of each visible GPU."""
    host_hz: float = Field(default=2.0, ge=0, le=20)
    """Readings of the server's processes and of the client."""
    prometheus_hz: float = Field(default=1.0, ge=0, le=10)
    """Readings of the server's counters and gauges, if it has any."""


class LoadOptions(Section):
    """Settings of the load generator."""

    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Processes that share the load, request by request in turn. ``auto``: enough to keep each below half a core at
    the expected token rate, with one core left free. Never more than slots or requests."""
    priority: PriorityOption = "auto"
    """Scheduling priority of the client during the load, so that a server that keeps all cores busy does not delay
    it. ``auto``: real-time scheduling at the lowest priority, else a negative nice value, else none, as permitted;
    ``none``: unchanged. ``benchctl doctor`` shows what is permitted."""


class EngineSettings(Section):
    """Kind of server software and the options that all variants share."""

    kind: EngineKind
    """Server software."""
    python: str | None = None
    """Interpreter of the engine's environment, for engines that are Python programs."""
    options: dict[str, Any] = {}
    """Options of the engine, listed below for each kind."""


class Profile(Section):
    """The YAML that describes an experiment, complete.

    ``checks`` holds the rules beyond types: ``baseline`` names a variant, factors exist, settings fit together.
    """

    name: Name
    """Name of the experiment and of its result directories; by default that of the file."""
    description: str = ""
    """One line for ``benchctl profiles list``."""
    seed: Seed = 0
    """Feeds every random stream: request set, arrivals, order of runs."""
    blocks: ReplicateCount = 8
    """Complete replicates: each runs the baseline and every cell on a fresh server. With ``stopping``, the most."""
    stopping: Stopping | None = None
    """Rule for ending earlier; null: the number of blocks is fixed."""
    stop: StopMode = "forced"
    """End of an output: ``forced`` at its planned length (equal work), ``natural`` where the model ends it,
    ``replay-natural`` where the baseline's model ended it (equal work, none of it past the end)."""
    engine: EngineSettings
    """Server software, shared by all variants: a preset's name, or kind and options."""
    model: str = "qwen2.5-7b"
    """Name in the built-in table of shapes, or a directory with a config.json."""
    hardware: str = "h100-sxm"
    """Hardware whose peak FLOP/s the achieved ones are compared with: a name of the hardware table, peaks as
    name:TFLOP/s:GB/s, or ``measured`` for those on file. A simulated server has its own (``engine.options``)."""
    step_time_model: str | None = None
    """File of a step-time model (``benchctl steptime fit``), which predicts the experiment and explains its
    results."""
    workload: Workload
    """Request set and arrival schedule."""
    sampling: Sampling = Sampling()
    """Sampling parameters that all variants share."""
    request: RequestOptions = RequestOptions()
    """Fields of requests that all variants share."""
    variants: dict[Name, Variant] = Field(min_length=1, max_length=MAX_VARIANTS)
    """Named server configurations."""
    baseline: Name = "baseline"
    """The variant that the others are compared with."""
    sweep: dict[str, Annotated[tuple[FactorValue, ...], Field(min_length=1)]] = {}
    """Values of each factor; each combination is a cell of every swept variant."""
    cells: tuple[dict[str, FactorValue], ...] = ()
    """Cells to run, each with a value of every factor of ``sweep``; empty: all combinations."""
    sweep_baseline: bool = False
    """Runs the baseline in every cell as well, and compares each cell of a variant with the same cell of the
    baseline."""
    allowed_differences: tuple[str, ...] = ()
    """Settings that may differ between variants although none of them sets these, as dotted paths; ``server.cb.*``
    covers all below ``server.cb``. With ``hardware``, blocks that were measured on unlike machines are pooled."""
    primary_metrics: tuple[str, ...] = ("step_ms", "tpot_ms", "wall_s")
    """Metrics that decide the verdict of a comparison, as far as the servers of both sides record them; all others
    are exploratory."""
    comparison: ComparisonRules = ComparisonRules()
    """Rules of the verdict."""
    gates: tuple[Gate, ...] = ("throttling", "foreign-gpu-process")
    """Conditions that a run must meet to be compared; a run that violates one is left out with its pair, and named.
    ``throttling``: no GPU slowed down because of heat or a hardware limit. ``foreign-gpu-process``: no other
    program used the GPU before or after. ``failed-requests``: none failed; without this gate, failed requests make
    the comparison incomplete."""
    timeouts: Timeouts = Timeouts()
    """Limits on waiting."""
    telemetry: Telemetry = Telemetry()
    """Sampling rates of the GPU and host readings."""
    load: LoadOptions = LoadOptions()
    """Settings of the load generator."""
    cluster: ClusterSettings = ClusterSettings()
    """The job of one block where blocks are handed out; nothing of it changes what is measured."""


class VariantSettings(Section):
    """The settings of one run: a variant in one cell, all overrides applied and checked."""

    variant: str
    model: str
    server: SerializeAsAny[ServerOptions]
    """Of the options class of the engine's kind."""
    sampling: Sampling
    request: RequestOptions = RequestOptions()
    guidance: Guidance | None

    def stated(self) -> dict[str, Any]:
        """The wishes of requests besides guidance, by dotted path: all sampling, and the fields that are set."""
        sections = {"sampling": self.sampling.stated(), "request": self.request.stated()}
        return {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}
