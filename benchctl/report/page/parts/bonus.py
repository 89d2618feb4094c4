"""The verdicts on backfill of bonus tokens: their sentences, and the rows that they rest on."""

from typing import Any

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.bonus.design import BonusDesign
from benchctl.analysis.bonus.sentences import context_in_words, modes_in_words, verdict_sentences
from benchctl.analysis.bonus.verdict import BackfillVerdict
from benchctl.report.text.bonus_table import HEADINGS, row_cells


def bonus_values(analysis: AnalyzedExperiment) -> dict[str, Any] | None:
    """Every verdict with its tables, in ms; None where no ways of backfill are compared."""
    if analysis.bonus is None:
        return None
    return {
        "name": analysis.results.path.resolve().name,
        "where": analysis.bonus.where,
        "headings": HEADINGS,
        "verdicts": [_verdict(design, verdict) for design, verdict in analysis.bonus.verdicts],
        "missing": analysis.bonus.missing,
    }


def _verdict(design: BonusDesign, verdict: BackfillVerdict) -> dict[str, Any]:
    return {
        "context": context_in_words(design),
        "sentences": verdict_sentences(verdict),
        "tables": [
            {"modes": modes_in_words(*modes), "rows": [row_cells(row) for row in verdict.rows(*modes)]}
            for modes in verdict.mode_pairs
        ],
    }
