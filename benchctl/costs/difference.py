"""The difference between observed and published FLOPs: each correction with its price.

The corrections are applied one after the other, so their prices add up exactly to the whole difference. The order
changes single prices (a correction is priced at the lengths and counts reached so far), not their sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchctl.costs.flops import FlopsAccount, price_work, published_work
from benchctl.costs.shapes import ModelShape
from benchctl.costs.work import (
    RunLengths,
    RunWork,
    StepLogCounts,
    TokenWork,
    observed_work,
    output_work,
    prompt_work,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One step from published to observed FLOPs; ``flops`` is negative if less was computed."""

    code: str
    meaning: str
    flops: int


class _Stage(NamedTuple):
    code: str
    meaning: str
    work: RunWork


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
    """Corrections that lead from ``published`` to ``observed_flops`` of the same run.

    Invariant: ``published.total`` plus all ``flops`` is the observed total. Corrections of a model are left out
    without that model, ``verification`` without speculation, and ``convention`` if ``published`` follows the
    published rule.
    """
    value = value_model.as_value_model() if value_model is not None else None
    output_tokens = lengths.totals().output_tokens
    corrections: list[Correction] = []
    reached = published.total
    for stage in _stages(lengths, counts, top_k):
        total = price_work(stage.work, base, value, output_tokens, draft_model=draft_model).total
        corrections.append(Correction(code=stage.code, meaning=stage.meaning, flops=total - reached))
        reached = total
    # A correction of 0 FLOPs is information, unless it could never apply.
    inapplicable = {"value-prefill", "value-extend", "candidates"} if value is None else set()
    inapplicable |= {"verification"} if counts.verification_tokens is None else set()
    inapplicable |= {"drafts"} if draft_model is None else set()
    inapplicable |= {"convention"} if corrections[0].flops == 0 else set()
    return tuple(correction for correction in corrections if correction.code not in inapplicable)


def _stages(lengths: RunLengths, counts: StepLogCounts, top_k: int) -> Iterator[_Stage]:
    observed = observed_work(lengths.sequences, counts)
    yield _Stage(
        "convention",
        "the published rule with a value head and candidates at full cost",
        published_work(lengths.totals(), top_k),
    )

    prompts = prompt_work(lengths.question_prompts)
    outputs = output_work(lengths.sequences)
    nothing = TokenWork()
    work = RunWork(
        base_prefill=prompts,
        base_decode=outputs,
        value_prefill=prompts if top_k >= 1 else nothing,
        value_extend=outputs if top_k >= 1 else nothing,
        value_candidates=outputs * max(top_k, 0),
    )
    yield _Stage("lengths", "each sequence's own length instead of rounded means", work)

    work = replace(
        work,
        base_prefill=replace(work.base_prefill, heads=observed.base_prefill.heads),
        value_prefill=replace(work.value_prefill, heads=0),
        value_extend=replace(work.value_extend, heads=0),
    )
    yield _Stage("head", "heads only where a token is sampled or a candidate scored", work)

    work = replace(work, base_decode=output_work(lengths.sequences, without_first=True))
    yield _Stage("first-token", "the first output token comes from prefill", work)

    work = replace(work, base_decode=observed.base_decode)
    yield _Stage("verification", "every draft token that the base model verified, also the rejected ones", work)

    work = replace(work, base_prefill=observed.base_prefill)
    yield _Stage("base-prefill", "prompt tokens that the base model prefilled, not one prompt per question", work)

    work = replace(work, value_prefill=observed.value_prefill)
    yield _Stage("value-prefill", "prompt tokens that the value model prefilled, sample by sample", work)

    work = replace(work, value_extend=observed.value_extend)
    yield _Stage("value-extend", "tokens by which the value model extended its prefixes, not every one", work)

    work = replace(work, value_candidates=observed.value_candidates)
    yield _Stage("candidates", "candidates scored, not top_k for each output token", work)

    meaning = "the draft model's passes: prompts, proposed tokens, and the backfill of bonus tokens"
    yield _Stage("drafts", meaning, observed)
