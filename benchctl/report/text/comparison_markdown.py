"""A comparison as Markdown, for the summary of a CI job or a comment on a change."""

from collections.abc import Iterable, Sequence

from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.text import verdict_sentence
from benchctl.report.text.acceptance_table import TITLE, acceptance_headings, acceptance_rows, compared_drafts
from benchctl.report.text.comparison_table import footnotes_of, headings_of, rows_of
from benchctl.report.text.decomposition_table import decomposition_headings, decomposition_rows
from benchctl.report.text.markdown import markdown_text
from benchctl.report.text.node_table import TITLE as NODES_TITLE
from benchctl.report.text.node_table import node_headings, node_rows


def markdown_of(comparison: Comparison, *, show_all: bool = False) -> str:
    """The verdict, the table, then what must be known to trust it."""
    headings = headings_of(comparison)
    lines = [
        f"**{markdown_text(verdict_sentence(comparison))}**",
        "",
        _row(headings),
        _ruler(headings),
    ]
    lines += [_row(row) for row in rows_of(comparison, show_all=show_all)]
    lines += _decomposition(comparison, show_all=show_all)
    if arms := compared_drafts(comparison):
        lines += ["", f"{TITLE}:", "", *_table(acceptance_headings(arms), acceptance_rows(arms))]
    if comparison.nodes is not None:
        rows = node_rows(comparison.nodes, show_all=show_all)
        lines += ["", f"{NODES_TITLE}:", "", *_table(node_headings(comparison.confidence), rows)]
    lines += ["", *(f"- {markdown_text(line)}" for line in footnotes_of(comparison))]
    return "\n".join(lines)


def _decomposition(comparison: Comparison, *, show_all: bool) -> list[str]:
    """A second table, where there is anything to divide; leading blanks would be lost in Markdown."""
    rows = list(decomposition_rows(comparison, show_all=show_all))
    if not rows:
        return []
    return ["", *_table(decomposition_headings(comparison), rows)]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(headings), _ruler(headings), *(_row(row) for row in rows)]


def _row(fields: Sequence[str]) -> str:
    return f"| {' | '.join(markdown_text(field).replace('  ', '&nbsp;&nbsp;') for field in fields)} |"


def _ruler(headings: Sequence[str]) -> str:
    return f"| {' | '.join(['---'] * len(headings))} |"
