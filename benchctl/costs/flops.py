"""FLOPs of a run under named conventions, and the rates that follow from them.

``published``
    The layer-level rule of the LenVM timing analysis in its final form: mean lengths rounded to whole tokens, the
    head charged at every prompt token, every output token decoded, value-model prefill once for each prompt, and
    k candidates for each output token. An upper bound of what guidance computes.
``lm-head-value-model``
    The same with the vocabulary head charged to the value model, as an earlier form of that analysis did.
``two-n``
    Its first form: 2 N FLOPs for each token, with N the model's nominal number of parameters; no attention, no
    value-model prefill.

``observed_flops`` prices the lengths and the step log of a run instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from benchctl.costs.hardware import Hardware
from benchctl.costs.shapes import ModelShape
from benchctl.costs.work import (
    Lengths,
    RunTotals,
    RunWork,
    StepLogCounts,
    TokenWork,
    decode_work,
    observed_work,
    prefill_work,
)
from benchctl.errors import UsageError
from benchctl.units import GIGA

Convention: TypeAlias = Literal["published", "two-n", "lm-head-value-model"]

_NOMINAL_PARAMS: Final = {
    "qwen2.5-0.5b": 490_000_000,
    "qwen2.5-1.5b": 1_540_000_000,
    "qwen2.5-3b": 3_090_000_000,
    "qwen2.5-7b": 7_610_000_000,
    "qwen2.5-14b": 14_800_000_000,
    "qwen2.5-32b": 32_500_000_000,
    "qwen2.5-72b": 72_700_000_000,
}
"""Parameters as model cards round them, the basis of the ``two-n`` figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFlops:
    """FLOPs by operator: projections, attention over positions, head."""

    linear: int = 0
    attention: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return self.linear + self.attention + self.head

    def __add__(self, other: "OperatorFlops") -> "OperatorFlops":
        return OperatorFlops(
            linear=self.linear + other.linear,
            attention=self.attention + other.attention,
            head=self.head + other.head,
        )

    def scaled(self, factor: float) -> "OperatorFlops":
        """Each operator times ``factor``, cut to a whole number as the published analysis does."""
        return OperatorFlops(
            linear=int(self.linear * factor), attention=int(self.attention * factor), head=int(self.head * factor)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsAccount:
    """FLOPs of one run by model and phase; each phase by operator.

    Invariants: ``base.total`` is prefill plus decode, ``value.total`` is prefill plus extend plus candidates,
    ``draft.total`` is prefill plus decode, ``total`` is base plus value plus draft. ``base_decode`` has the
    verification of drafts. ``value_extend`` keeps the value model's prefix up to date with the output,
    ``value_candidates`` scores the candidates.
    """

    base_prefill: OperatorFlops
    base_decode: OperatorFlops
    value_prefill: OperatorFlops
    value_extend: OperatorFlops
    value_candidates: OperatorFlops
    output_tokens: int
    draft_prefill: OperatorFlops = OperatorFlops()
    draft_decode: OperatorFlops = OperatorFlops()

    @property
    def base(self) -> OperatorFlops:
        return self.base_prefill + self.base_decode

    @property
    def value(self) -> OperatorFlops:
        return self.value_prefill + self.value_extend + self.value_candidates

    @property
    def draft(self) -> OperatorFlops:
        return self.draft_prefill + self.draft_decode

    @property
    def total(self) -> int:
        return self.base.total + self.value.total + self.draft.total

    @property
    def ratio(self) -> float | None:
        """Total over base: the factor by which the models beside the base multiply the computation, at these
        lengths.
        """
        return self.total / self.base.total if self.base.total else None

    @property
    def flops_per_output_token(self) -> float | None:
        """Decode, extend, candidates and drafts over output tokens; prefill is left out, tokens are not rounded."""
        if not self.output_tokens:
            return None
        per_token_work = self.base_decode + self.value_extend + self.value_candidates + self.draft_decode
        return per_token_work.total / self.output_tokens

    @property
    def gflops_per_output_token(self) -> float | None:
        flops = self.flops_per_output_token
        return None if flops is None else flops / GIGA


def price_work(
    work: RunWork,
    base: ModelShape,
    value_model: ModelShape | None,
    output_tokens: int,
    *,
    draft_model: ModelShape | None = None,
) -> FlopsAccount:
    """FLOPs of counted work: linear · tokens + attention · positions + head · heads, for each phase."""
    return FlopsAccount(
        base_prefill=_price(work.base_prefill, base),
        base_decode=_price(work.base_decode, base, is_decode=True),
        value_prefill=_price(work.value_prefill, value_model),
        value_extend=_price(work.value_extend, value_model, is_decode=True),
        value_candidates=_price(work.value_candidates, value_model, is_decode=True),
        output_tokens=output_tokens,
        draft_prefill=_price(work.draft_prefill, draft_model),
        draft_decode=_price(work.draft_decode, draft_model, is_decode=True),
    )


def _price(work: TokenWork, shape: ModelShape | None, *, is_decode: bool = False) -> OperatorFlops:
    """A latent attention computes a position of a decoding token in another way than one of a prompt."""
    if shape is None:
        return OperatorFlops()
    per_position = (
        shape.decode_attention_flops_per_position() if is_decode else shape.attention_flops_per_position()
    )
    return OperatorFlops(
        linear=shape.linear_flops_per_token() * work.tokens,
        attention=per_position * work.positions,
        head=shape.head_flops() * work.heads,
    )


def published_flops(
    totals: RunTotals,
    *,
    base: ModelShape,
    value_model: ModelShape | None = None,
    top_k: int = 0,
    candidate_cost: float = 1.0,
    convention: Convention = "published",
) -> FlopsAccount:
    """FLOPs by a published rule.

    With Q questions, N sequences, P = round(prompt tokens / Q) and O = round(output tokens / N), ties to even:

        base       = Q prefill(P) + N decode(P, O)
        extra      = Q prefill_v(P) + N decode_v(P, O) + int(N k m decode_v(P, O)) for each operator
        prefill(P) = linear P + attention P (P + 1) / 2 + head P
        decode     = linear O + attention (O P + O (O + 1) / 2) + head O

    m is ``candidate_cost``. The extra is charged whenever k >= 1, also at k = 1, where decoding is greedy and no
    value model runs; ``observed_flops`` charges what ran.

    Source: LenVM, pull request 2, as of commit b1b4ba0; earlier forms are dc93a52 (``two-n``) and 497f75b
    (``lm-head-value-model``). Raises UsageError for a ``candidate_cost`` that is negative or not finite.
    """
    if not (math.isfinite(candidate_cost) and candidate_cost >= 0):
        raise UsageError(f"candidate_cost is {candidate_cost}; it must be a finite number from 0")
    if top_k < 1:
        value_model = None
    if convention == "two-n":
        return _two_n_flops(totals, base, value_model, top_k * candidate_cost)
    if value_model is not None:
        head: Literal["lm_head", "value_head"] = "value_head" if convention == "published" else "lm_head"
        value_model = replace(value_model, head=head)
    account = price_work(published_work(totals, top_k), base, value_model, totals.output_tokens)
    return replace(account, value_candidates=account.value_candidates.scaled(candidate_cost))


def published_work(totals: RunTotals, top_k: int) -> RunWork:
    """Counts of the published rule; see ``published_flops``. Without a top_k the value model does nothing."""
    prompt = round(totals.prompt_tokens / totals.num_questions)
    output = round(totals.output_tokens / totals.num_sequences)
    prefill = prefill_work(prompt) * totals.num_questions
    decode = decode_work(prompt, output) * totals.num_sequences
    return RunWork(
        base_prefill=prefill,
        base_decode=decode,
        value_prefill=prefill if top_k >= 1 else TokenWork(),
        value_extend=decode if top_k >= 1 else TokenWork(),
        value_candidates=decode * max(top_k, 0),
    )


def _two_n_flops(
    totals: RunTotals, base: ModelShape, value_model: ModelShape | None, candidates_per_token: float
) -> FlopsAccount:
    """2 N (prompt + output) for the base, 2 N_v (1 + k) output for the value model; no rounding of lengths.

    The published 15.22 GFLOP per output token leave prompts out, and the published ratio of 2.17 has them in; it is
    2.188 at equal lengths, so that the guided run had 0.9 % fewer output tokens.
    """
    base_flops = 2 * _nominal_params(base)
    value_flops = 2 * _nominal_params(value_model) if value_model is not None else 0
    extend = OperatorFlops(linear=value_flops * totals.output_tokens)
    return FlopsAccount(
        base_prefill=OperatorFlops(linear=base_flops * totals.prompt_tokens),
        base_decode=OperatorFlops(linear=base_flops * totals.output_tokens),
        value_prefill=OperatorFlops(),
        value_extend=extend,
        value_candidates=extend.scaled(candidates_per_token),
        output_tokens=totals.output_tokens,
    )


def _nominal_params(shape: ModelShape) -> int:
    return _NOMINAL_PARAMS.get(shape.name, shape.num_params())


def observed_flops(
    sequences: Sequence[Lengths],
    counts: StepLogCounts,
    *,
    base: ModelShape,
    value_model: ModelShape | None = None,
    draft_model: ModelShape | None = None,
) -> FlopsAccount:
    """FLOPs of the forwarded tokens; ``observed_work`` states the conventions and those that it rejects.

    The value model is charged its value head whatever its shape says, because scoring uses no other. Drafts without
    a ``draft_model`` cost what their verification does.
    """
    return price_work(
        observed_work(sequences, counts),
        base,
        value_model.as_value_model() if value_model is not None else None,
        sum(output for _, output in sequences),
        draft_model=draft_model,
    )


def achieved_flops_per_s(flops: int, wall_s: float | None) -> float | None:
    """FLOPs over the time they took; None without a positive time."""
    return flops / wall_s if wall_s is not None and wall_s > 0 else None


def utilization_frac(flops: int, wall_s: float | None, hardware: Hardware | None) -> float | None:
    """Achieved FLOP/s over the device's peak of dense bfloat16; None when time or device are unknown.

    The peak is that of bfloat16 for quantised weights too, so that utilisations of one device compare.
    """
    achieved = achieved_flops_per_s(flops, wall_s)
    return achieved / hardware.peak_flops_per_s if achieved is not None and hardware is not None else None
