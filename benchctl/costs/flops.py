"""FLOPs of a run: work as counts, priced by model and phase, under published conventions or as observed.

Every convention comes down to counts of tokens forwarded, positions attended to and heads evaluated, which one
function (``price_work``) prices:

``published``
    The layer-level rule of the LenVM timing analysis in its final form: mean lengths rounded to whole tokens, the
    head charged at every prompt token, every output token decoded, value-model prefill once for each prompt, and
    k candidates for each output token. An upper bound of what guidance computes.
``lm-head-value-model``
    The same with the vocabulary head charged to the value model, as an earlier form of that analysis did.
``two-n``
    Its first form: 2 N FLOPs for each token, with N the model's nominal number of parameters; no attention, no
    value-model prefill.

``observed_flops`` prices the lengths and the step log of a run instead, and ``explain_difference`` leads from the
one to the other.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from benchctl.costs.hardware import Hardware
from benchctl.costs.run_work import (
    Lengths,
    RunLengths,
    RunTotals,
    RunWork,
    StepLogCounts,
    TokenWork,
    guided_work,
    observed_work,
    output_work,
    prompt_work,
    published_work,
)
from benchctl.costs.shapes import ModelShape
from benchctl.errors import UsageError
from benchctl.units import GIGA

Convention: TypeAlias = Literal["published", "two-n", "lm-head-value-model"]
Models: TypeAlias = Mapping[str, ModelShape | None]
"""The models ``base``, ``value`` and ``draft`` of a run."""

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

    def scaled(self, factor: float) -> "OperatorFlops":
        """Each operator times ``factor``, cut to a whole number as the published analysis does."""
        return OperatorFlops(
            linear=int(self.linear * factor), attention=int(self.attention * factor), head=int(self.head * factor)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsAccount:
    """FLOPs of one run by model and phase; each phase by operator.

    Phases are ``base_prefill``, ``base_decode`` with the verification of drafts, ``value_prefill``,
    ``value_extend``, which keeps the value model's prefix up to date with the output, ``value_candidates``, which
    scores the candidates, ``draft_prefill`` and ``draft_decode``. One that is left out has no FLOPs.
    """

    output_tokens: int
    phases: Mapping[str, OperatorFlops]

    def of(self, name: str) -> OperatorFlops:
        """FLOPs of one phase, or of all phases of the model ``base``, ``value`` or ``draft``."""
        parts = [flops for phase, flops in self.phases.items() if phase.startswith(name)]
        return OperatorFlops(
            linear=sum(part.linear for part in parts),
            attention=sum(part.attention for part in parts),
            head=sum(part.head for part in parts),
        )

    @property
    def total(self) -> int:
        return self.of("").total

    @property
    def ratio(self) -> float | None:
        """Total over base: the factor by which the models beside the base multiply the computation, at these
        lengths.
        """
        base = self.of("base").total
        return self.total / base if base else None

    @property
    def flops_per_output_token(self) -> float | None:
        """Decode, extend, candidates and drafts over output tokens; prefill is left out, tokens are not rounded."""
        per_token = sum(flops.total for phase, flops in self.phases.items() if not phase.endswith("prefill"))
        return per_token / self.output_tokens if self.output_tokens else None

    @property
    def gflops_per_output_token(self) -> float | None:
        flops = self.flops_per_output_token
        return None if flops is None else flops / GIGA


def mean_account(accounts: Sequence[FlopsAccount]) -> FlopsAccount:
    """The mean of several accounts, each number cut to a whole one."""
    phases, count = dict.fromkeys(phase for account in accounts for phase in account.phases), len(accounts)
    sums = {phase: [account.of(phase) for account in accounts] for phase in phases}
    return FlopsAccount(
        output_tokens=sum(account.output_tokens for account in accounts) // count,
        phases={
            phase: OperatorFlops(
                linear=sum(part.linear for part in parts) // count,
                attention=sum(part.attention for part in parts) // count,
                head=sum(part.head for part in parts) // count,
            )
            for phase, parts in sums.items()
        },
    )


def price_work(work: RunWork, models: Models, output_tokens: int) -> FlopsAccount:
    """FLOPs of counted work: linear · tokens + attention · positions + head · heads, for each phase.

    A latent attention computes a position of a decoding token in another way than one of a prompt.
    """
    phases = {}
    for phase, counts in work.items():
        model, _, kind = phase.partition("_")
        if (shape := models.get(model)) is not None and counts != TokenWork():
            of_prompt, of_decode = shape.attention_flops_per_position, shape.decode_attention_flops_per_position
            phases[phase] = OperatorFlops(
                linear=shape.linear_flops_per_token() * counts.tokens,
                attention=(of_prompt() if kind == "prefill" else of_decode()) * counts.positions,
                head=shape.head_flops() * counts.heads,
            )
    return FlopsAccount(output_tokens=output_tokens, phases=phases)


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
        value_model = replace(value_model, head="value_head" if convention == "published" else "lm_head")
    account = price_work(published_work(totals, top_k), {"base": base, "value": value_model}, totals.output_tokens)
    return FlopsAccount(
        output_tokens=totals.output_tokens,
        phases={
            phase: flops.scaled(candidate_cost) if phase == "value_candidates" else flops
            for phase, flops in account.phases.items()
        },
    )


def _two_n_flops(
    totals: RunTotals, base: ModelShape, value_model: ModelShape | None, candidates_per_token: float
) -> FlopsAccount:
    """2 N (prompt + output) for the base, 2 N_v (1 + k) output for the value model; no rounding of lengths.

    The published 15.22 GFLOP per output token leave prompts out, and the published ratio of 2.17 has them in; it is
    2.188 at equal lengths, so that the guided run had 0.9 % fewer output tokens.
    """
    base_flops, value_flops = (
        2 * _NOMINAL_PARAMS.get(shape.name, shape.num_params()) if shape is not None else 0
        for shape in (base, value_model)
    )
    extend = OperatorFlops(linear=value_flops * totals.output_tokens)
    return FlopsAccount(
        output_tokens=totals.output_tokens,
        phases={
            "base_prefill": OperatorFlops(linear=base_flops * totals.prompt_tokens),
            "base_decode": OperatorFlops(linear=base_flops * totals.output_tokens),
            "value_extend": extend,
            "value_candidates": extend.scaled(candidates_per_token),
        },
    )


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
        _observed_models(base, value_model, draft_model),
        sum(output for _, output in sequences),
    )


def _observed_models(base: ModelShape, value_model: ModelShape | None, draft_model: ModelShape | None) -> Models:
    return {
        "base": base,
        "value": None if value_model is None else value_model.as_value_model(),
        "draft": draft_model,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One step from published to observed FLOPs; ``flops`` is negative if less was computed."""

    code: str
    meaning: str
    flops: int


def explain_difference(
    published: FlopsAccount,
    *,
    lengths: RunLengths,
    counts: StepLogCounts,
    base: ModelShape,
    value_model: ModelShape | None,
    top_k: int,
    draft_model: ModelShape | None = None,
) -> tuple[Correction, ...]:
    """Corrections that lead from ``published`` to ``observed_flops`` of the same run, each with its price.

    Invariant: ``published.total`` plus all ``flops`` is the observed total. The order changes single prices (a
    correction is priced at the lengths and counts reached so far), not their sum. Corrections of a model are left
    out without that model, ``verification`` without speculation, and ``convention`` if ``published`` follows the
    published rule.
    """
    models = _observed_models(base, value_model, draft_model)
    work: dict[str, TokenWork] = {}
    corrections, reached = [], published.total
    for code, meaning, changed in _stages(lengths, counts, top_k):
        work |= changed
        total = price_work(work, models, published.output_tokens).total
        corrections.append(Correction(code=code, meaning=meaning, flops=total - reached))
        reached = total
    # A correction of 0 FLOPs is information, unless it could never apply.
    applies = {
        "convention": corrections[0].flops != 0,
        "verification": counts.verification_tokens is not None,
        "drafts": draft_model is not None,
        **dict.fromkeys(("value-prefill", "value-extend", "candidates"), value_model is not None),
    }
    return tuple(correction for correction in corrections if applies.get(correction.code, True))


def _stages(lengths: RunLengths, counts: StepLogCounts, top_k: int) -> Iterable[tuple[str, str, RunWork]]:
    """Code and meaning of each correction in their order, with the phases whose work it replaces."""
    observed = observed_work(lengths.sequences, counts)
    exact = guided_work(prompt_work(lengths.question_prompts), output_work(lengths.sequences), top_k)
    sampled = {
        "base_prefill": replace(exact["base_prefill"], heads=observed["base_prefill"].heads),
        "value_prefill": replace(exact["value_prefill"], heads=0),
        "value_extend": replace(exact["value_extend"], heads=0),
    }

    def logged(phase: str) -> RunWork:
        return {phase: observed[phase]}

    return (
        (
            "convention",
            "the published rule with a value head and candidates at full cost",
            published_work(lengths.totals(), top_k),
        ),
        ("lengths", "each sequence's own length instead of rounded means", exact),
        ("head", "heads only where a token is sampled or a candidate scored", sampled),
        (
            "first-token",
            "the first output token comes from prefill",
            {"base_decode": output_work(lengths.sequences, num_skipped=1)},
        ),
        (
            "verification",
            "every draft token that the base model verified, also the rejected ones",
            logged("base_decode"),
        ),
        (
            "base-prefill",
            "prompt tokens that the base model prefilled, not one prompt per question",
            logged("base_prefill"),
        ),
        (
            "value-prefill",
            "prompt tokens that the value model prefilled, sample by sample",
            logged("value_prefill"),
        ),
        (
            "value-extend",
            "tokens by which the value model extended its prefixes, not every one",
            logged("value_extend"),
        ),
        ("candidates", "candidates scored, not top_k for each output token", logged("value_candidates")),
        (
            "drafts",
            "the draft model's passes: prompts, proposed tokens, and the backfill of bonus tokens",
            observed,
        ),
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
