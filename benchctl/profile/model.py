"""The keys of a profile: closed pydantic models, in which an unknown key is an error. Lengths are in tokens."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from benchctl.guided.params import CONSTRAINTS, MODES, PARAMETERS
from benchctl.profile.arrival import Arrival
from benchctl.profile.bounds import (
    DEFAULT_MODEL,
    MAX_BLOCKS,
    MAX_LOADS,
    MAX_OUTPUTS,
    MAX_SEED,
    MAX_TOKENS,
    MAX_WARMUPS,
    MOST,
    PENALTIES,
    PILOT_LOADS,
)
from benchctl.profile.choices import (
    NAME_PATTERN,
    DatasetName,
    Penalty,
    Probability,
    RequestCount,
    Section,
    ServerOptions,
    Share,
    TokenCount,
    check_rules,
)
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.objective import CapacitySearch, Slo
from benchctl.profile.sections import (
    ClusterSettings,
    ComparisonRules,
    LoadOptions,
    RequestOptions,
    SharedPrefix,
    Stopping,
    Telemetry,
    Timeouts,
)
from benchctl.profile.yaml import Problem
from benchctl.records.record import StopMode
from benchctl.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    GuidanceMode: TypeAlias = str
    Constraint: TypeAlias = str
else:  # the same names for pydantic, which lists them in its errors
    GuidanceMode = Literal[MODES]
    Constraint = Literal[CONSTRAINTS]


def _parameter(name: str) -> Any:
    """The default, the limits and the meaning of a parameter."""
    parameter = PARAMETERS[name]
    limits: dict[str, Any] = dict(parameter.profile_bounds)
    if parameter.type == "number":
        limits |= {"ge": -MOST} if not limits.keys() & {"ge", "gt"} else {}
        limits |= {"le": MOST} if not limits.keys() & {"le", "lt"} else {}
    return Field(default=parameter.profile_default, description=parameter.meaning, **limits)


class Guidance(Section):
    """Guidance that the requests of a variant ask for (``custom_params`` of the fork)."""

    mode: GuidanceMode = _parameter("mode")
    value_scale: float = _parameter("value_scale")
    gamma: float = _parameter("gamma")
    value_entropy_threshold: float | None = _parameter("value_entropy_threshold")
    value_min: float | None = _parameter("value_min")
    target_value: float | None = _parameter("target_value")
    target_length: float | None = _parameter("target_length")
    target_length_mode: Literal["total", "remaining"] | None = _parameter("target_length_mode")
    value_constraint: Constraint | None = _parameter("value_constraint")

    @property
    def has_target(self) -> bool:
        """True where a hard constraint takes the place of mode and value_scale."""
        return self.target_value is not None or self.target_length is not None


LEAST_TEMPERATURE: Final = 0.001
"""Logits that are divided by less overflow."""


class Sampling(Section):
    """Sampling parameters of every request of a variant. ``top_k: -1`` keeps the whole vocabulary."""

    temperature: float = Field(default=1.0, ge=0, le=100)
    """Divides the logits; 0 is greedy."""
    top_p: Share = 1.0
    """Keeps the most probable tokens up to this probability mass."""
    top_k: int = Field(default=-1, ge=-1, le=1 << 24)
    """Keeps this many most probable tokens; 1 is greedy, -1 keeps all."""
    min_p: Probability = 0.0
    """Drops tokens less probable than this fraction of the most probable one."""
    presence_penalty: Penalty = 0.0
    """Taken from the logits of tokens that the answer has; 0: none."""
    frequency_penalty: Penalty = 0.0
    """Taken from the logits of tokens once for each time that the answer has them; 0: none."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    """Divides positive logits, and multiplies negative ones, of tokens that prompt or answer have; 1: none."""

    @property
    def is_greedy(self) -> bool:
        """True where the most probable token is always chosen."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties that change anything, by name."""
        return {name: value for name in PENALTIES if (value := getattr(self, name)) != _NEUTRAL[name]}

    def stated(self) -> dict[str, Any]:
        """All parameters but penalties that change nothing: a server spends time in every step on those it has."""
        return self.model_dump(exclude=set(PENALTIES)) | self.penalties

    @field_validator("temperature")
    @classmethod
    def _divides_without_overflow(cls, temperature: float) -> float:
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"is {temperature:g}; write 0 for greedy decoding, or at least {LEAST_TEMPERATURE}")
        return temperature

    @field_validator("top_k")
    @classmethod
    def _top_k_is_a_count(cls, top_k: int) -> int:
        check_rules((top_k == 0, "top_k is 0; write -1 for the whole vocabulary or a positive count"))
        return top_k


_NEUTRAL: Final = {name: Sampling.model_fields[name].default for name in PENALTIES}


MAX_PROMPT_TOKENS = 500_000_000
"""Tokens of all prompts of a run, which are prepared in memory."""
MAX_SAMPLES_OF_A_REQUEST = 128
"""Largest ``n`` of the OpenAI API."""


class LengthRange(Section):
    """Lengths drawn log-normally around ``mean`` with coefficient of variation ``cv``, cut to [min, max]."""

    mean: float = Field(gt=0, le=MAX_TOKENS, description="Mean length before cutting.")
    cv: float = Field(default=0.0, ge=0, le=5)
    """Standard deviation over mean; 0 gives every length the mean."""
    min: TokenCount = 1
    """Shortest length."""
    max: TokenCount = MAX_TOKENS
    """Longest length."""

    @model_validator(mode="after")
    def _ordered(self) -> "LengthRange":
        if not self.min <= self.mean <= self.max:
            raise ValueError(f"needs min <= mean <= max, got {self.min} <= {self.mean} <= {self.max}")
        return self


Length = TokenCount | LengthRange | Annotated[tuple[TokenCount, ...], Field(min_length=1)]
"""A list is taken in turn: request i has the length i modulo its number of lengths."""


def _longest(length: Length | None) -> int:
    """Tokens of the longest length, or 0; of a range those around its mean, which few exceed."""
    if isinstance(length, LengthRange):
        return min(length.max, math.ceil(length.mean * (1 + length.cv)))
    return max(length) if isinstance(length, tuple) else length or 0


class Turns(Section):
    """Conversations: each turn is sent when the answer before it has come and its user has thought."""

    number: Length = 4
    """Turns of a conversation: one number, a range, or a list that conversations take in turn. Of ShareGPT, at most
    the largest of them."""
    think_s: float = Field(default=1.0, ge=0, le=SECONDS_PER_HOUR)
    """Mean seconds from the last byte of an answer until the next turn is sent, drawn log-normally."""
    think_cv: float = Field(default=0.0, ge=0, le=5)
    """Standard deviation of think times over their mean; 0 gives every turn the mean."""
    answers: Literal["real", "recorded"] = "real"
    """Answers in later prompts: those of the server, or those of the data set."""
    max_tokens: TokenCount = 4096
    """A conversation ends before the turn, its first aside, whose prompt and output would have more tokens."""


def most_of(length: Length) -> int:
    """The longest of these lengths."""
    return length.max if isinstance(length, LengthRange) else _longest(length)


class Workload(Section):
    """Request set and arrival schedule."""

    dataset: DatasetName
    """Source of the prompts."""
    path: str | None = None
    """File to read in place of the one in the data directory; needed by ``custom``. A relative path starts at the
    working directory, else among the profiles. With ``huggingface``, a data set of the hub as ``owner/name``, and
    behind it the folder or file to read where there are several."""
    revision: str | None = None
    """Commit of the data set that ``huggingface`` reads, 40 hex digits."""
    split: str | None = None
    """Part of the data set that ``huggingface`` reads, such as ``test``: files with it in their names."""
    columns: dict[str, str] = {}
    """Column of the file for each field of ``custom`` and ``huggingface`` rows that is called otherwise there,
    such as ``{prompt: question}``."""
    num_prompts: RequestCount = 50
    """Prompts taken from the dataset; with ``turns`` conversations."""
    prompts_per_slot: RequestCount | None = None
    """With max_concurrency in ``sweep``: a load takes this many prompts for each of its slots, and num_prompts at
    most, so that loads of few slots do not last much longer than the others. null: num_prompts for every load."""
    selection: Literal["first", "sample"] = "first"
    """The first prompts in file order, or a seeded sample."""
    repeat: bool = False
    """Begin the dataset again when it has fewer rows than num_prompts; recorded arrivals go on behind the last."""
    samples_per_prompt: RequestCount = 1
    """Answers per prompt."""
    samples_as: Literal["one-request", "requests"] = "one-request"
    """Samples as one request with ``n``, or as separate requests with distinct seeds."""
    on_missing_dataset: Literal["generate", "fail"] = "generate"
    """Action when the dataset is not available: ``generate`` uses generated prompts and warns, ``fail`` stops."""
    input_len: Length | None = None
    """Prompt length of the ``synthetic`` dataset: one, a range, or a list that prompts take in turn."""
    prefix: SharedPrefix | None = None
    """First tokens that prompts of the ``synthetic`` dataset share, for planned hits in the prefix cache."""
    output_len: Length | None = None
    """Length of each output with stop mode ``forced``: one, a range, or a list that prompts take in turn, so that
    lists of one size in both keys pair prompts with outputs. null: the dataset's own lengths, if it has them."""
    max_tokens: TokenCount = 1500
    """Limit of each output with stop mode ``natural``, and of the natural lengths of ``replay-natural``."""
    turns: Turns | None = None
    """Sends conversations, whose turns are chats with all that came before; ``input_len`` and ``output_len`` are
    those of one turn. In a closed loop a slot is a user, with one conversation at a time. null: single prompts."""
    lengths_from: str | None = None
    """Result directory of the same prompts with stop mode ``natural``; its baseline gives the natural length of
    each answer. null: ``replay-natural`` measures it first; with other modes it stays unknown."""
    tokenizer: str | None = None
    """Tokenizer that counts prompts and writes those of a planned length: a directory with tokenizer.json, or a
    repository of the model hub. null: that of the model, where it is on this machine; else the server's; else an
    estimate."""
    chat: bool = False
    """Sends each prompt that is plain text as a chat with one message of the user; a planned length includes the
    chat template."""
    arrival: Arrival = Field(description="Schedule of the requests.")
    num_warmups: int = Field(default=1, ge=0, le=MAX_WARMUPS)
    """Requests sent to each fresh server before the measured ones; no metric includes them."""
    warmup_shapes: bool | None = None
    """Also warms up every batch size and prompt length of the load. null: on all engines but the simulator, unless
    num_warmups is 0."""
    warmup_tolerance: float = Field(default=0.1, gt=0, le=1)
    """The server is warm when two waves of warm-up requests in a row differ by no more than this fraction in their
    times per token, of decoding and of prompts."""
    max_warmup_waves: Annotated[int, Field(ge=0, le=50)] | None = None
    """Waves after which the load begins although the server is not warm by ``warmup_tolerance``; 0 sends none.
    null: 8, and none with num_warmups 0, to the simulator, or to a server that benchctl does not start. After five
    seconds no third or later one begins."""
    allow_prefix_cache_hits: bool = False
    """Allows prompts to be found in a prefix cache; otherwise a run with cache hits is invalid."""

    @property
    def plans_hits(self) -> bool:
        """True where prompts are to be found in a prefix cache, of which each load has a part of its own."""
        return self.prefix is not None or self.turns is not None

    @model_validator(mode="after")
    def _of_a_size(self) -> "Workload":
        num_turns = 1 if self.turns is None else _longest(self.turns.number)
        num_outputs = self.num_prompts * self.samples_per_prompt * num_turns
        tokens = self.num_prompts * num_turns * _longest(self.input_len)
        prefix, longest = self.prefix, most_of(self.input_len or MAX_TOKENS)
        check_rules(
            (
                num_outputs > MAX_OUTPUTS,
                f"asks for {num_outputs} outputs, more than {MAX_OUTPUTS}; lower num_prompts",
            ),
            (
                tokens > MAX_PROMPT_TOKENS,
                (
                    f"asks for {tokens:,} prompt tokens, which no memory holds, more than {MAX_PROMPT_TOKENS:,}; "
                    "lower num_prompts or input_len"
                ),
            ),
            (
                self.samples_as == "one-request" and self.samples_per_prompt > MAX_SAMPLES_OF_A_REQUEST,
                (
                    f"asks for {self.samples_per_prompt} samples in one request, which takes at most "
                    f"{MAX_SAMPLES_OF_A_REQUEST}; set samples_as: requests"
                ),
            ),
            (
                prefix is not None and (prefix.hit_rate is None) == (prefix.len is None),
                "prefix needs hit_rate or len, and not both; set one of them",
            ),
            (
                prefix is not None and not prefix.tokens_of(longest),
                (
                    f"prefix comes to no block of {prefix and prefix.block} tokens in a prompt of {longest}; raise "
                    "it, or input_len, or lower prefix.block"
                ),
            ),
            (
                prefix is not None and (prefix.len or 0) >= longest,
                f"prefix.len is {prefix and prefix.len}, and prompts have {longest} tokens at most; lower it",
            ),
            (
                prefix is not None and self.turns is not None,
                "prefix is set, and conversations share what was said before; leave out prefix or turns",
            ),
            (
                prefix is not None and self.samples_per_prompt > 1,
                (
                    f"samples_per_prompt is {self.samples_per_prompt}, and from the second on the cache has more "
                    "of a prompt than its prefix; set 1, or leave out prefix"
                ),
            ),
        )
        return self


Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=128)]
MAX_VARIANTS = 128
Gate = Literal["throttling", "foreign-gpu-process", "failed-requests"]
FactorValue = str | int | float | bool | None
if TYPE_CHECKING:
    EngineKind: TypeAlias = str
else:  # the same names for pydantic, which lists them in its errors
    EngineKind = Literal[tuple(ENGINES)]


class Control(Section):
    """The place of a variant in a ladder of controls; written by ``controls`` of another variant."""

    of: Name = Field(description="Variant that the ladder leads to.")
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

    ``checks`` and ``settings`` hold the rules beyond types: ``baseline`` names a variant, settings fit together.
    """

    name: Name = Field(
        description="Name of the experiment and of its result directories; by default that of the file."
    )
    description: str = ""
    """One line for ``benchctl profiles list``."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Feeds every random stream: request set, arrivals, order of runs."""
    blocks: int = Field(default=8, ge=1, le=MAX_BLOCKS)
    """Complete replicates: each runs the baseline and every cell on a fresh server. With ``stopping``, the most."""
    loads_per_server: Annotated[int, Field(ge=1, le=MAX_LOADS)] | Literal["auto"] = 1
    """Times that the request set is sent to each fresh server. The value of a run is the mean of its loads, and the
    block stays the unit of statistics. ``auto``: 3 in the first two blocks, then the number that is expected to
    cost least, from scatter and cost alone."""
    per_server: Literal["fresh", "ladder"] = "fresh"
    """Where ``sweep`` has load factors: ``fresh`` starts a server for each load, ``ladder`` sends all loads to one
    server one after the other, in an order that all servers of a block share and that is balanced over blocks."""
    stopping: Stopping | None = None
    """Rule for ending earlier; null: the number of blocks is fixed."""
    slo: Slo | None = None
    """Objective of every request, which ``goodput`` and ``slo_attained_frac`` count; null: none."""
    capacity: CapacitySearch | None = None
    """With ``capacity_concurrency`` or ``capacity_rate`` in primary_metrics: a pilot finds the sizes of the loads;
    null: those of ``sweep``."""
    stop: StopMode = "forced"
    """End of an output: ``forced`` at its planned length (equal work), ``natural`` where the model ends it,
    ``replay-natural`` where the baseline's model ended it (equal work, none of it past the end)."""
    engine: EngineSettings = Field(
        description="Server software, shared by all variants: a preset's name, or kind and options."
    )
    model: str = DEFAULT_MODEL
    """Name in the built-in table of shapes, or a directory with a config.json."""
    hardware: str = "h100-sxm"
    """Hardware whose peak FLOP/s the achieved ones are compared with: a name of the hardware table, peaks as
    name:TFLOP/s:GB/s, or ``measured`` for those on file. A simulated server has its own (``engine.options``)."""
    step_time_model: str | None = None
    """File of a step-time model (``benchctl steptime fit``), which predicts the experiment and explains its
    results."""
    workload: Workload = Field(description="Request set and arrival schedule.")
    sampling: Sampling = Sampling()
    """Sampling parameters that all variants share."""
    request: RequestOptions = RequestOptions()
    """Fields of requests that all variants share."""
    variants: dict[Name, Variant] = Field(
        min_length=1, max_length=MAX_VARIANTS, description="Named server configurations."
    )
    baseline: Name = "baseline"
    """The variant that the others are compared with."""
    sweep: dict[str, Annotated[tuple[FactorValue, ...], Field(min_length=1)]] = {}
    """Values of each factor; each combination is a cell of every swept variant. Load factors apply to all variants,
    the baseline included, which is compared with the others under the same load."""
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

    @property
    def num_loads(self) -> int:
        """Loads that each server is planned to get; with ``auto`` until the number is chosen."""
        return PILOT_LOADS if self.loads_per_server == "auto" else self.loads_per_server

    @cached_property
    def settings_by_arm(self) -> "dict[str, tuple[VariantSettings | None, list[Problem]]]":
        """Settings of arms by variant and cell, or their problems, each resolved once."""
        return {}

    @cached_property
    def loads_by_point(self) -> "dict[str, tuple[Profile | None, list[Problem]]]":
        """The profile under each load, or the problems of that, each made once."""
        return {}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "Profile":
        """A copy with some values changed, whose arms are resolved anew."""
        copy = super().model_copy(update=update, deep=deep)
        for cached in ("settings_by_arm", "loads_by_point"):
            copy.__dict__.pop(cached, None)
        return copy

    def __getstate__(self) -> dict[Any, Any]:
        """All but the settings of arms, whose classes are made for each engine; another process resolves them."""
        state = super().__getstate__()
        return state | {"__dict__": {name: state["__dict__"][name] for name in type(self).model_fields}}


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
