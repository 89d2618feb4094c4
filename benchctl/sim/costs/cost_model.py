"""Cost models: the batch of a step goes in, the times of its sections come out."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from benchctl.costs.hardware import Hardware, hardware_for
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.engines.sim.options import COST_MODELS
from benchctl.sim.config import SimConfig
from benchctl.units import NS_PER_S
from benchctl.workload.seeded import named_stream

if TYPE_CHECKING:  # numpy, which a server does without
    from benchctl.records.columns import Integers


class GuidedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of guidance in one step. ``fused`` is None if nothing was scored or the revision cannot fuse."""

    wanted_rows: int = 0
    scored_rows: int = 0
    candidates: int = 0
    value_prefill_tokens: int = 0
    value_extend_tokens: int = 0
    fused: bool | None = None


UNGUIDED: Final = GuidedStep()


class StepBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The batch of one step.

    ``context_tokens`` is the sum of the contexts after the step, ``attended_positions`` the positions that all
    new tokens see together. ``is_greedy`` is None when no row samples. ``longest_context`` and
    ``most_new_tokens`` are maxima over the rows, for a server that ``pads_batches``.
    """

    num_seqs: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampling: int
    context_tokens: int
    attended_positions: int
    is_greedy: bool | None
    guided: GuidedStep = UNGUIDED
    loads_value_model: bool = False
    longest_context: int = 0
    most_new_tokens: int = 0
    decode_context: int = 0
    """The part of ``context_tokens`` that belongs to decoding rows."""
    shortest_decode: int = 0
    longest_decode: int = 0
    """Contexts of the shortest and the longest decoding row, unless 0 because the cost model does not ask."""
    draft_tokens: int = 0
    """The part of ``num_decode_tokens`` that are drafts to be verified, and are in the contexts."""
    draft_positions: int = 0
    """The part of ``attended_positions`` that drafts see."""

    @property
    def is_plain_decode(self) -> bool:
        """True if all rows decode one token each and none of them asks for guidance."""
        return not self.num_prefill_tokens and not self.guided.wanted_rows and not self.draft_tokens

    @property
    def num_decodes(self) -> int:
        """The decoding rows."""
        return self.num_decode_tokens - self.draft_tokens

    @property
    def decode_positions(self) -> int:
        """The part of ``attended_positions`` that decoding rows see: the newest token of each its whole context."""
        return self.decode_context - self.draft_tokens + self.draft_positions


LVM_PARTS: Final = ("lvm_build_pending", "value_model_load", "lvm_forward", "lvm_apply_guidance")
"""Sections inside of lvm_apply_outer, in the order of a record."""
SECTIONS: Final = (
    *("schedule", "model_forward", "pre_lvm"),
    *LVM_PARTS,
    *("lvm_apply_outer", "sample", "sampler_total"),
)
"""All sections of the model's own step, in the order of a record."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one step in nanoseconds; the parts do not overlap, so they add up.

    None means that the section does not exist in this step. ``sampler_rest`` and ``lvm_rest`` are the time of
    their sections outside of the named parts.
    """

    schedule: int = 0
    model_forward: int
    sampler_rest: int | None = None
    pre_lvm: int | None = None
    sample: int | None = None
    lvm_rest: int | None = None
    lvm_build_pending: int | None = None
    lvm_forward: int | None = None
    lvm_apply_guidance: int | None = None
    value_model_load: int | None = None

    def scaled(self, factor: float) -> "StepCost":
        """Every part times ``factor``, to whole nanoseconds."""
        parts = msgspec.structs.asdict(self).items()
        return StepCost(**{name: round(value * factor) for name, value in parts if value is not None})

    def parts(self) -> list[int]:
        """The times of the sections that exist."""
        return [value for value in msgspec.structs.astuple(self) if value is not None]

    def total_ns(self) -> int:
        """Duration of the step."""
        return sum(filter(None, msgspec.structs.astuple(self)))

    def sections(self) -> dict[str, int]:
        """The nested sections of a step record; parents are the sums of their parts."""
        parts: dict[str, int | None] = msgspec.structs.asdict(self)
        if self.lvm_rest is not None:
            parts["lvm_apply_outer"] = self.lvm_rest + sum(parts[name] or 0 for name in LVM_PARTS)
        if self.sampler_rest is not None:
            parts["sampler_total"] = self.total_ns() - self.schedule - self.model_forward
        return {name: part for name in SECTIONS if (part := parts.get(name)) is not None}


class GuidedCounts(NamedTuple):
    """Counts of guidance in steps of a stretch, as in GuidedStep; ``fused`` is 1, 0, or -1 for None."""

    scored_rows: "Integers"
    candidates: "Integers"
    value_prefill_tokens: "Integers"
    value_extend_tokens: "Integers"
    fused: "Integers"


Lines: TypeAlias = tuple[tuple[float, float], ...]
"""Intercept and slope of each of one line or two."""


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """The price of decode steps of one batch, as long as its rows stay: all that changes is its context.

    model_forward = ``forward_ns`` + round(max over ``lines`` of intercept + slope x), with x the sum of the
    contexts, or the longest context where the server ``pads_batches``. It holds for ``since`` <= x < ``until``,
    so that a price with bends in it is given piece by piece. A stretch of steps needs no call of the model.

    With guided rows, that is the price of a step that scores none of them; one that does has the sections
    ``scored_rest`` and the time ``value_forward_ns`` in place of ``rest``.
    """

    rest: StepCost
    """Every section but model_forward, which is 0 here."""
    lines: Lines
    """In ns and ns per token."""
    forward_ns: int = 0
    since: int = 0
    until: int | None = None
    scored_rest: StepCost | None = None
    """Every section of a step that scores rows; model_forward and lvm_forward are 0."""
    scored_ns: int = 0
    """What ``scored_rest`` takes longer than ``rest``."""
    value_forward_ns: Callable[[int, int], int] | None = None
    """lvm_forward of such steps, of ``fused`` and ``value_prefill_tokens`` as in GuidedCounts."""

    def holds_at(self, position: int) -> bool:
        """True if this is the price at x = ``position``."""
        return self.since <= position and (self.until is None or position < self.until)

    def forward_at(self, position: int) -> int:
        """model_forward in whole nanoseconds at x = ``position``."""
        return self.forward_ns + round(max([intercept + slope * position for intercept, slope in self.lines]))

    def cost_at(self, position: int) -> StepCost:
        """The whole price at x = ``position``."""
        return msgspec.structs.replace(self.rest, model_forward=self.forward_at(position))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRules:
    """Ways in which an emulated server schedules and answers unlike the simulator's own."""

    max_num_seqs: int | None = None
    """Sequences in one batch at most, below the configured limit."""
    is_unlimited: bool = False
    """Whether tokens in one step and key-value memory have no limit."""
    pads_batches: bool = False
    """Whether a batch is padded to its longest row: ``price`` then needs that row and the largest chunk."""
    has_closing_step: bool = False
    """Whether a sequence stays for one more step after its last token."""
    answer_length: Callable[[int], int] | None = None
    """Tokens of a natural answer to a prompt of so many tokens; None takes the published distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The price of a step, and the rules of the server that is emulated."""

    step: Callable[[StepBatch], StepCost]
    """The price of one step."""
    decode: Callable[[StepBatch], DecodeCost] | None = None
    """The price of steps like this one, which has decoding rows only. None where no lines describe it: ``step`` is
    then called for each."""
    decodes_guided: bool = False
    """Whether ``decode`` has a price for guided rows, too, once the value model is loaded."""
    forward_ns: Callable[[int, int, int, int], int] | None = None
    """model_forward of an unguided step with prompts, of its new tokens, the positions that they see, the rows that
    sample, and the sum of the contexts. None where the other sections are not those of so many decoding rows, or
    where prices of ``decode`` do not hold for all contexts."""
    reads_contexts: bool = False
    """Whether ``step`` and ``decode`` need the shortest and the longest context of the decoding rows."""
    rules: ServerRules = field(default_factory=ServerRules)

    def price(self, batch: StepBatch) -> StepCost:
        """The price of one step: on the line of its stretch where there is one.

        Where batches are padded, a step without new tokens may be that of prompts that a cache has.
        """
        if self.decode is not None and batch.is_plain_decode and not self.rules.pads_batches:
            return self.decode(batch).cost_at(batch.context_tokens)
        return self.step(batch)


def served_models(config: SimConfig) -> tuple[ModelShape, ModelShape | None, Hardware]:
    """The model, the value model and the device that a configuration names.

    Raises UsageError when one is unknown.
    """
    value_shape = None if config.value_model is None else shape_for(config.value_model).as_value_model()
    return shape_for(config.model), value_shape, hardware_for(config.hardware)


def cost_model_for(config: SimConfig) -> CostModel:
    """The cost model that a configuration names. Raises UsageError when a model or the device is unknown."""
    cost_model: CostModel = import_module(COST_MODELS[config.cost_model].module).cost_model(config)
    return cost_model


def value_model_load_ns(shape: ModelShape) -> int:
    """Extra time of the first guided step on a server that loads its value model lazily: weights / 1 GB/s."""
    # 3.1 s for the 1.5B value model, an assumption
    return round(shape.weight_bytes() / 1e9 * NS_PER_S)


NoiseSource: TypeAlias = Callable[[], float]
"""Draws the factor of the next step."""


def published_noise(seed: int, *, has_value_model: bool) -> NoiseSource:
    """Run-to-run variation of step times, of the published size: factors of one server life.

    Five identical baselines of the k sweep have a coefficient of variation of 14 %, four guided runs with k >= 2
    one of 1.8 %. Each server life draws one log-normal factor of mean 1 and that variation (stream
    ``<seed>:server``), each step a small one on top (``<seed>:steps``).
    """
    sigma, mu = _lognormal(0.018 if has_value_model else 0.14)
    life = named_stream(seed, "server").lognormvariate(mu, sigma)
    step_sigma, step_mu = _lognormal(0.02)
    draw = named_stream(seed, "steps").lognormvariate
    return lambda: life * draw(step_mu, step_sigma)


class PlantedFaults:
    """The faults that a configuration plants into the steps of one server life."""

    def __init__(self, config: SimConfig) -> None:
        self._config: Final = config
        self._num_steps = 0
        self._launch: Final = named_stream(config.noise_seed, "launch").lognormvariate(0.0, config.launch_scatter)
        self._sizes: Final[set[int]] = set()
        """Numbers of sequences that steps have had."""
        self._progress, self._largest, self._largest_before = 0.0, 0, 0  # batches since a request of a load ended

    def next_step(self, num_seqs: int, progress: float) -> tuple[float, int]:
        """Factor and additional nanoseconds of the next step, where this share of the load is over."""
        config, is_new = self._config, num_seqs not in self._sizes
        self._sizes.add(num_seqs)
        self._num_steps += 1
        if progress < self._progress:  # another load begins
            self._largest, self._largest_before = 0, self._largest
        self._progress, self._largest = progress, max(self._largest, num_seqs if progress else 0)
        is_slow = self._num_steps <= config.slow_first_steps
        factor = (
            self._launch
            * (1 + config.drift * progress)
            * (1 + config.aftermath * (num_seqs < self._largest_before))
            * (config.slow_first_factor if is_slow else 1.0)
        )
        return factor, round(config.first_use_pause_s * NS_PER_S) if is_new else 0


def _lognormal(cv: float) -> tuple[float, float]:
    """Sigma and mu of the log-normal distribution of mean 1: s^2 = ln(1 + cv^2), mu = -s^2 / 2."""
    variance = math.log1p(cv * cv)
    return math.sqrt(variance), -variance / 2
