"""The work of steps from the counts that engines log: rows, new tokens and contexts summed over the batch.

A log does not say which row has which context. Decoding rows have one new token each, or one and K drafts, so their
sums are exact; of the prompts in a step two things are assumed:

* prompts of one step are equally long, so their pairs of positions are P (S + T / 2) with T = tokens / prompts;
* a prompt that is computed in chunks continues where the step before left it. Which step a prompt ends in follows
  from the tokens that clients get: those of decoding rows with accepted drafts, and one for each prompt that ends.
"""

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.steptime.work import Quantity, StepWork

Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]

EXTENTS: Final = ("sequences", "tokens of context for each decoding row", "prompt tokens")
"""What says how far a step is from those of a fit."""
CACHE_FULL_FRAC: Final = 0.95
"""Above this share of its key-value memory an engine begins to preempt, and step times are no longer those of the
batch."""


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
    is_open = ended < num_prefills
    for i in np.flatnonzero(is_open[:-1]):
        share = prefill_tokens[i] / num_prefills[i]
        context[i + 1] = (context[i] if num_prefills[i] == 1 else 0.0) + share
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
