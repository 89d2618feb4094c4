"""The verdict on a whole directory as a JSON document: every comparison with the baseline, made or refused."""

from typing import Any

from benchctl.report.documents.comparison import document_of
from benchctl.report.page.verdict import ComparisonVerdict, PageVerdict


def verdict_document(verdict: PageVerdict) -> dict[str, Any]:
    """The verdict, and under ``comparisons`` the document of each comparison; those of controls decide nothing."""
    return {
        "verdict": verdict.word,
        "exit_code": verdict.exit_code,
        "summary": verdict.sentence,
        "comparisons": [
            {**comparison_document(one), "is_control": one.is_control, "sides": one.sides} for one in verdict.all
        ],
        "notes": list(verdict.notes),
    }


def comparison_document(one: ComparisonVerdict) -> dict[str, Any]:
    """One comparison; where none could be made, the reason in the same keys."""
    if one.comparison is not None:
        return document_of(one.comparison)
    return {
        "verdict": one.word,
        "exit_code": one.exit_code,
        "summary": one.sentence,
        "reasons": list(one.differences) or [one.problem],
        "a": one.a_name,
        "b": one.b_name,
        "cells": [],
        "metrics": [],
    }
