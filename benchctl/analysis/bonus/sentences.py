"""The verdict on backfill in sentences."""

from typing import Final

from benchctl.analysis.bonus.bonus import (
    Backfill,
    BackfillComparison,
    BackfillVerdict,
    BonusDesign,
    MeasuredBonus,
    cheaper_from,
)
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS
from benchctl.formats import percentage, range_of
from benchctl.profile.choices import Mode

WAYS: Final[dict[Backfill, str]] = {"expansion": "batch expansion", "prefill": "a prefill pass"}
_MODES: Final[dict[Mode, str]] = {"eager": "without graphs", "graph": "with graphs"}


def modes_in_words(decode_mode: Mode, prefill_mode: Mode) -> str:
    if decode_mode == prefill_mode:
        return f"decode and prefill {_MODES[decode_mode]}"
    return f"decode {_MODES[decode_mode]}, prefill {_MODES[prefill_mode]}"


def context_in_words(design: BonusDesign) -> str:
    return f"{design.context_tokens} tokens in the cache of each sequence"


def bonus_headline(bonus: MeasuredBonus) -> str:
    """The number of decided comparisons, and the answer at each context for each pair of modes."""
    rows = [row for _, verdict in bonus.verdicts for row in verdict.comparisons]
    if not rows:
        return "no comparison of ways of backfill has all its passes"
    num_decided = sum(row.cheaper is not None for row in rows)
    decided = "" if bonus.is_decided else f"{num_decided} of {len(rows)} comparisons are decided; "
    answers = []
    for design, verdict in bonus.verdicts:
        context = f"behind {design.context_tokens} tokens, " if len(bonus.verdicts) > 1 else ""
        answers += [f"{context}{sentence}" for sentence in _answers(verdict)]
    return decided + "; ".join(answers)


def verdict_sentences(verdict: BackfillVerdict) -> list[str]:
    """One sentence for each pair of modes, and one on how certain all intervals are together."""
    blocks = range_of([row.num_blocks for row in verdict.comparisons])
    together = (
        f"all differences lie in their intervals together with {percentage(verdict.confidence)} confidence, "
        f"which takes {percentage(verdict.row_confidence, 4)} of each, over {blocks} blocks"
    )
    has_intervals = any(row.difference.low_ns is not None for row in verdict.comparisons)
    return [*_answers(verdict), *([together] if has_intervals else [])]


def _answers(verdict: BackfillVerdict) -> list[str]:
    return [
        f"{modes_in_words(*modes)}: {_cheaper_way(verdict.rows(*modes), verdict.rows(*modes, only_all=True))}"
        for modes in verdict.mode_pairs
    ]


def _cheaper_way(rows: tuple[BackfillComparison, ...], rows_of_all: tuple[BackfillComparison, ...]) -> str:
    blocks = min(row.num_blocks for row in rows)
    if blocks < MIN_PAIRED_BLOCKS:
        return f"no verdict from {blocks} blocks; {MIN_PAIRED_BLOCKS} are the least that give one (--blocks)"
    if answer := cheaper_from(rows):
        return f"{_answer(*answer)}, for every number of tokens"
    if answer := cheaper_from(rows_of_all):
        return f"where every sequence lacks a token, {_answer(*answer)}; for fewer tokens see the table"
    largest = rows_of_all[-1]
    return f"inconclusive at batch {largest.batch_size}, whose interval holds 0; more blocks tell more (--blocks)"


def _answer(way: Backfill, least: int, most: int) -> str:
    sizes = f"at batch {least}" if least == most else f"from batch {least} on (measured up to {most})"
    return f"{WAYS[way]} is cheaper {sizes}"
