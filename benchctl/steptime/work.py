"""The work of engine steps as counts, the deployment that does it, and the words of a step-time model.

Every quantity is one number or an array with one value for each step: formulas hold for both, so that a log of a
million steps and one step of a simulator are priced by the same lines of code.

Engines log rows, new tokens and contexts summed over the batch: a log does not say which row has which context.
Decoding rows have one new token each, or one and K drafts, so their sums are exact; of the prompts in a step two
things are assumed:

* prompts of one step are equally long, so their pairs of positions are P (S + T / 2) with T = tokens / prompts;
* a prompt that is computed in chunks continues where the step before left it. Which step a prompt ends in follows
  from the tokens that clients get: those of decoding rows with accepted drafts, and one for each prompt that ends.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.costs.hardware import Hardware
from benchctl.costs.shapes import ModelShape

Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Quantity: TypeAlias = float | Floats
"""One step, or many at once."""

Structure: TypeAlias = Literal["original", "overlap", "roofline"]
"""``original`` is the published form with seven coefficients; ``overlap`` takes max(compute, kv + weights) with
per-layer, per-request and all-reduce terms; ``roofline`` is the analytic bound, which nothing is fitted to."""

ExpertsRead: TypeAlias = Literal["linear", "uniform", "measured"]
"""Number of experts whose weights a step reads: min(N, n k), N (1 - (1 - k / N)^n), or a table of the user's."""


Backfill: TypeAlias = Literal["none", "expansion", "prefill"]
"""Way in which a draft's cache gets the bonus token; ``none`` costs nothing: a draft without a cache, such as
n-grams, or one that is a head of the target."""

EXTENTS: Final = ("sequences", "tokens of context for each decoding row", "prompt tokens")
"""What says how far a step is from those of a fit."""
CACHE_FULL_FRAC: Final = 0.95
"""Above this share of its key-value memory an engine begins to preempt, and step times are no longer those of the
batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One coefficient with its bootstrap interval; ``unit`` is empty for a factor on a time at peak."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""
    is_identified: bool = True
    """Whether the data determine it; a feature that never varies has no coefficient of its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepWork:
    """Counts of one step or of many.

    Row i of a batch has S_i tokens in the cache before the step and T_i new ones. ``*_context`` is the sum of S_i
    over the rows of that phase, ``*_positions`` the sum of T_i (S_i + T_i / 2), which is the number of pairs of a
    new token and a position that it attends to. A decoding row has T_i = 1 unless it verifies drafts.
    """

    num_prefills: Quantity = 0.0
    prefill_tokens: Quantity = 0.0
    prefill_context: Quantity = 0.0
    prefill_positions: Quantity = 0.0
    num_decodes: Quantity = 0.0
    decode_tokens: Quantity = 0.0
    decode_context: Quantity = 0.0
    decode_positions: Quantity = 0.0
    num_sampled: Quantity = 0.0
    """Tokens whose logits are computed: those of decoding rows, and the last of prompts that end in this step."""
    guided_rows: Quantity = 0.0
    candidates: Quantity = 0.0
    value_prefill_tokens: Quantity = 0.0
    value_extend_tokens: Quantity = 0.0

    @property
    def num_seqs(self) -> Quantity:
        return self.num_prefills + self.num_decodes

    @property
    def tokens(self) -> Quantity:
        return self.prefill_tokens + self.decode_tokens

    @property
    def context(self) -> Quantity:
        return self.prefill_context + self.decode_context


def one_step(
    *,
    num_decodes: float,
    context: float,
    num_prefills: float = 0.0,
    prompt_tokens: float = 0.0,
    prompt_context: float = 0.0,
    row_tokens: float = 1.0,
) -> StepWork:
    """A step of decoding rows with ``context`` tokens each in the cache, and of so many prompts.

    Each prompt has ``prompt_tokens`` new tokens behind ``prompt_context`` in the cache, and ends in this step. A
    row that verifies K drafts has ``row_tokens`` = K + 1 new tokens, and logits for each of them.
    """
    return StepWork(
        num_prefills=num_prefills,
        prefill_tokens=num_prefills * prompt_tokens,
        prefill_context=num_prefills * prompt_context,
        prefill_positions=num_prefills * prompt_tokens * (prompt_context + prompt_tokens / 2),
        num_decodes=num_decodes,
        decode_tokens=num_decodes * row_tokens,
        decode_context=num_decodes * context,
        decode_positions=num_decodes * row_tokens * (context + row_tokens / 2),
        num_sampled=num_decodes * row_tokens + num_prefills,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The model and the devices that run a step. ``tensor_parallel`` devices of one kind share each layer.

    ``weight_bytes_per_param`` replaces the format of the checkpoint's projections, for a server that quantises
    weights as it loads them; the arithmetic stays that of the shape.
    """

    shape: ModelShape
    hardware: Hardware
    tensor_parallel: int = 1
    weight_bytes_per_param: float | None = None
    kv_bytes_per_element: float = 2.0
    value_shape: ModelShape | None = None
    measured_experts: tuple[tuple[float, float], ...] = ()
    """Tokens of a step and experts that they read in one layer, in the order of tokens."""

    @property
    def param_bytes(self) -> float:
        """Bytes of one weight of a projection."""
        return self.shape.param_bytes() if self.weight_bytes_per_param is None else self.weight_bytes_per_param


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The file or result directory that steps were read from; ``sha256`` is that of its step log."""

    path: str
    sha256: str
    engine: str | None = None
    engine_version: str | None = None
    clock: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedSteps:
    """Steps of one run with their durations: what a model is fitted to and judged by.

    ``run`` and ``model`` name the groups that hold-outs leave out; ``duration_us`` has one value for each step of
    ``work``. ``is_saturated`` marks steps that a fit leaves out: preemption, a full cache, an empty batch.
    """

    run: str
    model: str
    deployment: Deployment
    work: StepWork
    duration_us: Floats
    is_saturated: Flags
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Steps of ``is_saturated`` by the first reason that holds for them."""
    origin: Origin | None = None


def count_step_work(
    *,
    num_prefills: Floats,
    prefill_tokens: Floats,
    num_decodes: Floats,
    decode_tokens: Floats,
    context_after: Floats,
    output_tokens: Floats | None = None,
    draft_tokens: Floats | float = 0.0,
    accepted_tokens: Floats | float = 0.0,
    guided: dict[str, Floats] | None = None,
) -> StepWork:
    """The work of each step of one run, in the order of its log.

    ``context_after`` is the sum of the contexts after the step, of all rows; ``output_tokens`` the tokens that
    clients get, NaN where unknown. ``draft_tokens`` are those of ``decode_tokens`` that are verified, each with
    logits of its own, and ``accepted_tokens`` of them go to clients. ``guided`` holds the fields of a guided step
    by their names in ``StepWork``.
    """
    ended = _ended(num_prefills, num_decodes + accepted_tokens, output_tokens)
    prefill_context = _chunk_context(num_prefills, prefill_tokens, ended)
    before = np.maximum(context_after - prefill_tokens - decode_tokens, 0.0)
    prefill_context = np.where(num_decodes > 0, np.minimum(prefill_context, before), before)
    prefill_context = np.where(num_prefills > 0, prefill_context, 0.0)
    decode_context = np.where(num_decodes > 0, before - prefill_context, 0.0)
    rows = np.maximum(num_prefills, 1.0)
    prefill_positions = prefill_tokens / rows * (prefill_context + prefill_tokens / 2)
    per_row = decode_tokens / np.maximum(num_decodes, 1.0)
    return StepWork(
        num_prefills=num_prefills,
        prefill_tokens=prefill_tokens,
        prefill_context=prefill_context,
        prefill_positions=prefill_positions,
        num_decodes=num_decodes,
        decode_tokens=decode_tokens,
        decode_context=decode_context,
        decode_positions=per_row * (decode_context + decode_tokens / 2),
        num_sampled=num_decodes + draft_tokens + ended,
        **(guided or {}),
    )


def most_query_tokens(work: StepWork) -> int:
    """Largest number of query tokens of a decoding row in these steps, 0 without decoding rows.

    Counts are sums over a step, so that it is the largest mean of a step, rounded up: some row had at least that.
    """
    rows, tokens = np.broadcast_arrays(work.num_decodes, work.decode_tokens)
    decodes = rows > 0
    return int(np.ceil(tokens[decodes] / rows[decodes]).max(initial=0.0))


def stacked(columns: Iterable[Quantity], num_steps: int = 1) -> Floats:
    """Quantities as the columns of an array with a row for each step."""
    *rows, _ = np.broadcast_arrays(*columns, np.zeros(num_steps))
    return np.column_stack(rows)


def extents_of(work: StepWork, num_steps: int = 1) -> Floats:
    """The ``EXTENTS`` of each step as columns, 0 for what it does not have."""
    context = work.decode_context / np.maximum(work.num_decodes, 1.0)
    return stacked((work.num_seqs, context, work.prefill_tokens), num_steps)


def range_of(extents: Floats) -> tuple[tuple[float, ...], ...]:
    """Least and most of each extent over the steps that have it; 0 where none has it."""
    most = extents.max(axis=0)
    return tuple(np.where(extents > 0, extents, most).min(axis=0).tolist()), tuple(most.tolist())


def distances(extents: Floats, fitted_range: tuple[tuple[float, ...], ...]) -> Floats:
    """Distance of each extent from its range, |log((1 + x) / (1 + bound))|; 0 within it."""
    logs, (least, most) = np.log1p(extents), np.log1p(fitted_range)
    return np.where(extents > 0, np.maximum(np.maximum(logs - most, least - logs), 0.0), 0.0)


def _ended(num_prefills: Floats, decoded: Floats, output_tokens: Floats | None) -> Floats:
    """Prompts that end in each step; all of them where the tokens that clients get are unknown."""
    if output_tokens is None:
        return num_prefills
    first_tokens = np.clip(output_tokens - decoded, 0.0, num_prefills)
    return np.where(np.isnan(output_tokens), num_prefills, first_tokens)


def _chunk_context(num_prefills: Floats, prefill_tokens: Floats, ended: Floats) -> Floats:
    """Tokens that earlier steps computed of the prompts of each step.

    An engine leaves at most one prompt of a step unfinished, so a step carries on the tokens of one prompt.
    """
    context = np.zeros(len(num_prefills))
    for i in np.flatnonzero((ended < num_prefills)[:-1]):
        before = context[i] if num_prefills[i] == 1 else 0.0
        context[i + 1] = before + prefill_tokens[i] / num_prefills[i]
    return context


def first_reasons(reasons: Mapping[str, Flags]) -> tuple[Flags, dict[str, int]]:
    """Steps for which any reason holds, and the number of steps by the first reason that does."""
    counts: dict[str, int] = {}
    is_out: Flags = np.zeros(0, dtype=np.bool_)
    for reason, holds in reasons.items():
        is_out = np.zeros(len(holds), dtype=np.bool_) if not len(is_out) else is_out
        counts[reason] = int(np.sum(holds & ~is_out))
        is_out |= holds
    return is_out, {reason: number for reason, number in counts.items() if number}
