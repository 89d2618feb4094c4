"""The validated, frozen Profile: what an experiment is.

Every section is a closed pydantic model: unknown keys are errors. ``profile/load.py`` reads YAML into it and
``profile/planning/plan.py`` unfolds it into ordered runs. Lengths are in tokens, rates in requests per second,
durations in seconds, as people write them.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, SerializeAsAny, field_validator

from benchctl.profile.engine_options import ServerOptions
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.guidance import Guidance
from benchctl.profile.section import MOST, Section
from benchctl.profile.workload import Workload
from benchctl.records.manifest import StopMode

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Gate = Literal["throttling", "foreign-gpu-process", "failed-requests"]
FactorValue = str | int | float | bool | None
PriorityOption = Literal["auto", "none"]
if TYPE_CHECKING:
    EngineKind: TypeAlias = str
else:  # the same names for pydantic, which lists them in its errors
    EngineKind = Literal[tuple(ENGINES)]


class Sampling(Section):
    """Sampling parameters of every request of a variant. ``top_k: -1`` keeps the whole vocabulary."""

    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keeps the most probable tokens up to this probability mass."""
    top_k: int = Field(default=-1, ge=-1)
    """Keeps this many most probable tokens; 1 is greedy, -1 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drops tokens less probable than this fraction of the most probable one."""

    @property
    def is_greedy(self) -> bool:
        """True where the most probable token is always chosen."""
        return self.temperature == 0 or self.top_k == 1

    @field_validator("top_k")
    @classmethod
    def _top_k_is_a_count(cls, top_k: int) -> int:
        if top_k == 0:
            raise ValueError("top_k is 0; write -1 for the whole vocabulary or a positive count")
        return top_k


class Control(Section):
    """The place of a variant in a ladder of controls; written by ``controls`` of another variant."""

    of: Name
    """Variant whose price the step helps to divide."""
    rung: Literal["flags", "idle", "neutral"]
    """Which step it is."""


class Variant(Section):
    """One named server configuration, as far as it differs from the profile's own settings."""

    description: str = ""
    """What the variant is for."""
    server: dict[str, Any] = {}
    """Engine options that replace those of the profile."""
    sampling: dict[str, Any] = {}
    """Sampling parameters that replace those of the profile."""
    guidance: Guidance | None = None
    """What requests ask of the value model; a variant with this section is guided."""
    swept: bool | tuple[str, ...] = True
    """Whether the factors of ``sweep`` apply, or which of them; never for the baseline."""
    controls: bool = False
    """Whether the steps from the baseline to this variant are measured too, as variants of their own:
    ``<name>-flags`` (its server options without a value model), ``<name>-idle`` (its server, asked as the baseline
    is) and ``<name>-neutral`` (its guidance at value_scale 0)."""
    control: Control | None = None
    """Which step to which variant this one is."""


class Stopping(Section):
    """A rule, declared before the first run, by which an experiment ends before its last block."""

    precision: float = Field(gt=0, lt=1)
    """Fraction, 0.01 for one percent: the experiment ends when half the interval of every primary metric in every
    cell is at most that wide, whatever the sign of a change."""
    looks: int = Field(default=4, ge=1, le=20)
    """How often that is looked at, evenly from 6 blocks on; the last look is at the last block. Intervals are those
    of 1 - 0.05 / looks, so that more looks cost width."""


class Timeouts(Section):
    """Limits in seconds."""

    ready_s: float = Field(default=600.0, gt=0, le=MOST)
    """From launch until the server answers."""
    request_s: float = Field(default=600.0, gt=0, le=MOST)
    """From sending a request to its last token."""
    connect_s: float = Field(default=10.0, gt=0, le=MOST)
    """For opening a connection."""
    first_token_s: float | None = Field(default=None, gt=0, le=MOST)
    """From sending a request to its first token; null: only ``request_s`` counts."""
    between_tokens_s: float | None = Field(default=None, gt=0, le=MOST)
    """From one token of a request to the next; null: only ``request_s`` counts."""
    stall_s: float = Field(default=120.0, gt=0, le=MOST)
    """Without a token of any request, while requests are open, until the server counts as hung."""
    stop_s: float = Field(default=10.0, gt=0, le=MOST)
    """From asking a server to end until it is killed."""


class ComparisonRules(Section):
    """The rules of the verdict, declared before the first run."""

    estimator: Literal["robust", "mean"] = "robust"
    """``robust`` gives blocks that lie far off little weight; ``mean`` gives all blocks the same."""


class Telemetry(Section):
    """Sampling rates in Hz; 0 switches a sampler off."""

    gpu_hz: float = Field(default=10.0, ge=0, le=100)
    """Readings of each visible GPU."""
    host_hz: float = Field(default=2.0, ge=0, le=20)
    """Readings of the server's processes and of the client."""
    prometheus_hz: float = Field(default=1.0, ge=0, le=10)
    """Readings of the server's counters and gauges, where it offers them."""


class LoadOptions(Section):
    """The load generator itself."""

    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Processes that the load is split over, request by request in turn; ``auto``: as many as keep each below half
    a core by the tokens that are expected, leaving a core free. Never more than slots or requests."""
    priority: PriorityOption = "auto"
    """What the load client asks of the system, so that a server that keeps all cores busy does not hold it up:
    ``auto`` real-time scheduling at the lowest priority, else a negative nice value, else nothing, as far as
    permitted and while the load lasts; ``none`` never. ``benchctl doctor`` says what is permitted."""


class EngineSettings(Section):
    """Kind of server software and the options that all variants share."""

    kind: EngineKind
    """Server software."""
    python: str | None = None
    """Interpreter of the environment that has the engine, for engines that are Python programs."""
    options: dict[str, Any] = {}
    """Options of that software, listed below for each."""


class Profile(Section):
    """The YAML that describes an experiment, complete and valid.

    Invariants: ``baseline`` names a variant; every factor of ``sweep`` sets a key that the swept variants
    accept; with a guided variant in modes ``centered_exp`` or ``value_bias``, top_k is finite.
    """

    name: Name
    """Name of the experiment and of its result directories; the file's name unless it is given."""
    description: str = ""
    """One line for ``benchctl profiles list``."""
    seed: int = Field(default=0, ge=0)
    """Feeds every random stream: request set, arrivals, order of runs."""
    blocks: int = Field(default=8, ge=1, le=10_000)
    """Complete replicates, each a fresh server for the baseline and for every cell; with ``stopping``, the most."""
    stopping: Stopping | None = None
    """When to end earlier; null: never, the number of blocks is fixed."""
    stop: StopMode = "forced"
    """``forced`` gives every output its planned length (equal work); ``natural`` lets the model end it;
    ``replay-natural`` gives every output the length at which the baseline's model ended it (equal work, none of it
    past the end)."""
    engine: EngineSettings
    """Server software, shared by all variants: a preset's name, or kind and options."""
    model: str = "qwen2.5-7b"
    """Name in the built-in table of shapes, or a directory with a config.json."""
    hardware: str = "h100-sxm"
    """Whose peaks FLOP/s are compared with; a name of the hardware table."""
    workload: Workload
    """Request set and arrival schedule."""
    sampling: Sampling = Sampling()
    """Sampling parameters that all variants share."""
    variants: dict[Name, Variant] = Field(min_length=1)
    """Named server configurations."""
    baseline: Name = "baseline"
    """The variant that the others are compared with."""
    sweep: dict[str, Annotated[tuple[FactorValue, ...], Field(min_length=1)]] = {}
    """Factor to values; each combination is a cell of every swept variant."""
    allowed_differences: tuple[str, ...] = ()
    """Settings in which variants may differ, as dotted paths; ``guidance.*`` covers what is below."""
    primary_metrics: tuple[str, ...] = ("step_ms", "tpot_ms", "wall_s")
    """Metrics that decide the verdict of a comparison; all others are exploratory."""
    comparison: ComparisonRules = ComparisonRules()
    """How the experiment is judged."""
    gates: tuple[Gate, ...] = ("throttling", "foreign-gpu-process")
    """What must hold in a run for it to be compared; one that violates a gate is left out with its pair, and named.
    ``throttling``: no GPU slowed itself for heat or at the demand of its hardware. ``foreign-gpu-process``: no
    other program computed on it before or after. ``failed-requests``: none failed; without this gate they make
    the comparison incomplete."""
    timeouts: Timeouts = Timeouts()
    """Limits on waiting."""
    telemetry: Telemetry = Telemetry()
    """Sampling rates of the GPU and host readings."""
    load: LoadOptions = LoadOptions()
    """The load generator itself."""


class VariantSettings(Section):
    """The settings of one run: a variant in one cell, all overrides applied and checked."""

    variant: str
    model: str
    server: SerializeAsAny[ServerOptions]
    """Of the engine's own class, which ``settings.py`` sees to."""
    sampling: Sampling
    guidance: Guidance | None
