"""The verdicts on backfill of bonus tokens as JSON documents; times in nanoseconds."""

from typing import Any

from benchctl.analysis.bonus.published import SOURCE
from benchctl.analysis.bonus.results import MeasuredBonus, PublishedBeside
from benchctl.analysis.bonus.sentences import published_limits, verdict_sentences
from benchctl.analysis.bonus.verdict import Comparison, Cost


def bonus_document(measured: MeasuredBonus) -> dict[str, Any]:
    """The output of ``benchctl micro bonus --json``: the verdicts, beside the published numbers."""
    return {
        "schema_version": 1,
        "results": str(measured.path),
        **verdicts_document(measured),
        "published": {
            "source": SOURCE,
            "passes": [_published(each) for each in measured.published],
            "limits": published_limits(),
        },
    }


def verdicts_document(measured: MeasuredBonus) -> dict[str, Any]:
    """Every row of every verdict, as ``summary.json`` and the page hold them."""
    return {
        "model": measured.model,
        "device": measured.device,
        "dtype": measured.dtype,
        "verdicts": [
            {
                "context_tokens": design.context_tokens,
                "confidence": verdict.confidence,
                "row_confidence": verdict.row_confidence,
                "comparisons": [_row(row) for row in verdict.comparisons],
                "sentences": verdict_sentences(verdict),
            }
            for design, verdict in measured.verdicts
        ],
        "missing": list(measured.missing),
    }


def _row(row: Comparison) -> dict[str, Any]:
    return {
        "batch_size": row.batch_size,
        "bonus_tokens": row.bonus_tokens,
        "decode_mode": row.decode_mode,
        "prefill_mode": row.prefill_mode,
        "num_blocks": row.num_blocks,
        "decode_ns": _cost(row.decode),
        "expansion_ns": _cost(row.expansion),
        "prefill_ns": _cost(row.prefill),
        "difference_ns": _cost(row.difference),
        "cheaper": row.cheaper,
    }


def _published(each: PublishedBeside) -> dict[str, Any]:
    return {
        "phase": each.phase,
        "mode": each.mode,
        "batch_size": each.batch_size,
        "published_ms": each.published_ms,
        "here_ns": None if each.cost is None else _cost(each.cost),
    }


def _cost(cost: Cost) -> dict[str, float | None]:
    return {"centre": cost.centre_ns, "low": cost.low_ns, "high": cost.high_ns}
