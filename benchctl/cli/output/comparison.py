"""A comparison on the screen and in files, whose format follows from the suffix."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.text import verdict_sentence
from benchctl.analysis.compare.unpaired_sides import is_unpaired
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.cli.output.screen import verdict_text, wide_console
from benchctl.cli.pictures import drawable
from benchctl.errors import InvalidDataError, UsageError
from benchctl.records.jsonl import write_bytes_atomic
from benchctl.report.documents.comparison import document_of, refusal_document
from benchctl.report.text.acceptance_table import TITLE, acceptance_headings, acceptance_rows, compared_drafts
from benchctl.report.text.comparison_markdown import markdown_of
from benchctl.report.text.comparison_table import footnotes_of, headings_of, rows_of
from benchctl.report.text.decomposition_table import decomposition_headings, decomposition_rows
from benchctl.report.text.markdown import fenced, markdown_text
from benchctl.report.text.node_table import TITLE as NODES_TITLE
from benchctl.report.text.node_table import node_headings, node_rows
from benchctl.untrusted.text import visible_line

PAGE: Final = ".html"
SUFFIXES: Final = (".json", ".md", ".csv", ".png", PAGE)
_MOST_CHARACTERS: Final = 200
"""A field of a table with a longer label would push the numbers away."""
_SUMMARY: Final = "GITHUB_STEP_SUMMARY"


def checked_outputs(outputs: Sequence[Path]) -> tuple[Path, ...]:
    """Check the paths before any work. Raises UsageError for an unknown suffix, a missing directory or a picture
    that cannot be drawn.
    """
    for path in outputs:
        if path.suffix not in SUFFIXES:
            raise UsageError(f"--output {path}: unknown suffix; name a file that ends in {', '.join(SUFFIXES)}")
        if not path.parent.is_dir():
            raise UsageError(f"--output {path}: {path.parent} is not a directory; create it first")
        if path.suffix == ".png":
            drawable(path)
    return tuple(outputs)


def summary_path() -> Path:
    """The file that the job's environment names. Raises UsageError without one."""
    named = os.environ.get(_SUMMARY)
    if not named:
        raise UsageError(
            f"--github-summary appends to the file named by {_SUMMARY}, which is not set; outside a job of GitHub "
            "Actions use --output FILE.md instead"
        )
    return Path(named)


def write_comparison(comparison: Comparison, path: Path, *, show_all: bool) -> None:
    """Replace ``path`` with the comparison in the format of its suffix."""
    write_bytes_atomic(path, _content(comparison, path.suffix, show_all=show_all))


def write_page(
    a: str,
    b: str,
    options: CompareOptions,
    path: Path,
    comparison: Comparison | None = None,
    loaded: Sequence[Experiment] = (),
) -> tuple[str, ...]:
    """Replace ``path`` with the page on two sides; returns descriptions of damaged files.

    ``comparison`` is that of the sides where it was already made, ``loaded`` their experiments where it was of
    directories.
    """
    if is_unpaired(a, b):
        _write_files_page(a, b, options, path, comparison)
        return ()
    from benchctl.analysis.analyzed import analyze, analyze_directory
    from benchctl.report.page.build import sides_page

    a_side, b_side = parse_side(a), parse_side(b)
    is_one = a_side.path.resolve() == b_side.path.resolve()
    analyses = [
        analyze(loaded[i]) if loaded else analyze_directory(side.path, allow_suspect=options.allow_suspect)
        for i, side in enumerate((a_side,) if is_one else (a_side, b_side))
    ]
    a_analysis, b_analysis = analyses[0], analyses[-1]
    for side, analysis in ((a_side, a_analysis), (b_side, b_analysis)):
        variants = dict.fromkeys(planned.variant for planned in analysis.results.plan.runs)
        if variants and side.variant not in {None, *variants}:
            raise UsageError(f"{side.path} has no variant {side.variant!r}; it has {', '.join(variants)}")
    write_bytes_atomic(path, sides_page((a_analysis, a_side), (b_analysis, b_side), options, comparison).encode())
    return tuple(dict.fromkeys((*a_analysis.damage, *b_analysis.damage)))


def _write_files_page(a: str, b: str, options: CompareOptions, path: Path, comparison: Comparison | None) -> None:
    from benchctl.analysis.compare.unpaired import compare_paths
    from benchctl.analysis.compare.unpaired_sides import runs_of_side
    from benchctl.report.page.build import files_page
    from benchctl.report.page.foreign import ForeignSides

    comparison = compare_paths(a, b, options) if comparison is None else comparison
    a_runs, b_runs = (runs_of_side(side, allow_suspect=options.allow_suspect) for side in (a, b))
    sides = ForeignSides(a_name=comparison.a_name, b_name=comparison.b_name, a=a_runs, b=b_runs)
    write_bytes_atomic(path, files_page(comparison, sides).encode())


def _content(comparison: Comparison, suffix: str, *, show_all: bool) -> bytes:
    if suffix == ".png":
        from benchctl.report.plots.forest import forest_plot

        return forest_plot(comparison)
    if suffix == ".csv":
        from benchctl.report.documents.csv_files import comparison_csv

        return comparison_csv(comparison)
    if suffix == ".md":
        return f"{markdown_of(comparison, show_all=show_all)}\n".encode()
    return f"{json.dumps(document_of(comparison), indent=1, allow_nan=False)}\n".encode()


def write_refusal(error: InvalidDataError, outputs: Sequence[Path], summary: Path | None) -> None:
    """Write the reason why nothing was compared to JSON and Markdown; other formats cannot express it."""
    message = f"**not compared: {markdown_text(str(error).splitlines()[0])}**\n\n{fenced(str(error))}"
    for path in outputs:
        if path.suffix == ".json":
            write_bytes_atomic(path, f"{json.dumps(refusal_document(error), indent=1)}\n".encode())
        elif path.suffix == ".md":
            write_bytes_atomic(path, f"{message}\n".encode())
    if summary is not None:
        append(summary, message)


def append(path: Path, text: str) -> None:
    """Append to a job's summary, which other steps write, too."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def print_comparison(comparison: Comparison, *, show_all: bool = False) -> None:
    """Print the verdict, the table, the decomposition of the time, then the footnotes."""
    console = wide_console()
    console.print(verdict_text(verdict_sentence(comparison), "bold"))
    console.print()
    console.print(_table(headings_of(comparison), rows_of(comparison, show_all=show_all)))
    console.print()
    parts = list(decomposition_rows(comparison, show_all=show_all))
    if parts:
        console.print(_table(decomposition_headings(comparison), parts))
        console.print()
    if arms := compared_drafts(comparison):
        console.print(TITLE)
        console.print(_table(acceptance_headings(arms), acceptance_rows(arms)))
        console.print()
    if comparison.nodes is not None:
        console.print(NODES_TITLE)
        rows = node_rows(comparison.nodes, show_all=show_all)
        console.print(_table(node_headings(comparison.confidence), rows))
        console.print()
    for line in footnotes_of(comparison):
        console.print(visible_line(line))


def _table(headings: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(visible_line(heading, _MOST_CHARACTERS), no_wrap=True)
    for row in rows:
        table.add_row(*(verdict_text(visible_line(field, _MOST_CHARACTERS)) for field in row))
    return table
