"""``benchctl compare DIR``: every other variant of one directory against its baseline, as on its page."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchctl.analysis.compare.compare import CompareOptions, deciding_metrics
from benchctl.analysis.experiment.pairing import Side, parse_side
from benchctl.analysis.summary.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.cli.commands.compare import PAGE, append, print_comparison
from benchctl.cli.screen import PICTURE_SUFFIXES
from benchctl.errors import RecordError, UsageError
from benchctl.interop.readers.files import is_foreign
from benchctl.records.directory import open_results
from benchctl.records.files import write_bytes_atomic
from benchctl.report.documents.csv_files import comparisons_csv, verdict_document
from benchctl.report.page.page import directory_page
from benchctl.report.page.verdict import ComparisonVerdict, PageVerdict, directory_verdict
from benchctl.report.tables.compare import fenced, markdown_of, markdown_text


def baseline_side(text: str) -> str | None:
    """The baseline of the directory where ``text`` names one variant of it (``DIR:variant``); None for all of it.

    Raises UsageError for files of another tool, which have no baseline.
    """
    if is_foreign(text):
        raise UsageError(f"{text} holds results of another tool: name the side to judge as well, as B")
    side = parse_side(text)
    if side.variant is None:
        return None
    return str(Side(side.path, open_results(side.path).manifest().baseline))


def compare_directory(
    path: Path,
    options: CompareOptions,
    outputs: Sequence[Path],
    summary: Path | None,
    *,
    form: str,
    show_all: bool,
) -> int:
    """Compare, write and print as ``form`` says: ``table``, ``json`` or ``markdown``; returns the exit code.

    Raises UsageError where nothing but the baseline was planned, and for options that fit no comparison.
    """
    deciding_metrics(options.metrics)
    analysis = analyze_directory(path, allow_suspect=options.allow_suspect)
    verdict = directory_verdict(analysis, options)
    if not verdict.all and analysis.damage:
        raise RecordError("\n".join(analysis.damage))
    if not verdict.all:
        raise UsageError(f"{path}: {verdict.sentence}; name the side to judge as well, as B")
    if all(one.problem is not None and one.exit_code == UsageError.exit_code for one in verdict.all):
        raise UsageError(verdict.all[0].problem or "")
    for output in outputs:
        write_bytes_atomic(output, _content(analysis, verdict, output, show_all=show_all))
    if summary is not None:
        append(summary, _markdown(verdict, show_all=show_all))
    if form == "json":
        print(json.dumps(verdict_document(verdict), indent=1, allow_nan=False))
    elif form == "markdown":
        print(_markdown(verdict, show_all=show_all))
    else:
        _print(verdict, show_all=show_all)
    return verdict.exit_code


def _content(analysis: AnalyzedExperiment, verdict: PageVerdict, output: Path, *, show_all: bool) -> bytes:
    comparisons = {one.sides: one.comparison for one in verdict.all if one.comparison is not None}
    if output.suffix == PAGE:
        return directory_page(analysis, verdict=verdict, is_inside=False).encode()
    if output.suffix == ".md":
        return f"{_markdown(verdict, show_all=show_all)}\n".encode()
    if output.suffix == ".csv":
        return comparisons_csv(comparisons)
    if output.suffix in PICTURE_SUFFIXES:
        from benchctl.report.charts.forest import forest_plot

        if len(comparisons) != 1:
            raise UsageError(
                f"--output {output}: a picture shows one comparison, and these are {len(comparisons)}; name two "
                "sides, or a file that ends in .html"
            )
        return forest_plot(next(iter(comparisons.values())), output.suffix)
    return f"{json.dumps(verdict_document(verdict), indent=1, allow_nan=False)}\n".encode()


def _headline(verdict: PageVerdict) -> str | None:
    """The verdict of the whole, where it is not that of a single comparison."""
    return f"{verdict.word}: {verdict.sentence}" if len(verdict.all) > 1 else None


def _markdown(verdict: PageVerdict, *, show_all: bool) -> str:
    parts = [f"**{markdown_text(headline)}**" for headline in [_headline(verdict)] if headline is not None]
    for one in verdict.all:
        if one.comparison is None:
            sentence = markdown_text(f"{one.word}: {one.sentence}")
            parts.append(f"**{sentence}**\n\n{fenced(one.problem or '')}")
        else:
            parts.append(markdown_of(one.comparison, show_all=show_all))
    return "\n\n".join(parts)


def _print(verdict: PageVerdict, *, show_all: bool) -> None:
    if headline := _headline(verdict):
        print(f"{headline}\n", flush=True)
    for i, one in enumerate(verdict.all):
        if i:
            print(flush=True)
        _print_one(one, show_all=show_all)


def _print_one(one: ComparisonVerdict, *, show_all: bool) -> None:
    if one.comparison is None:
        print(f"{one.word}: {one.problem}", flush=True)
        return
    if one.is_control:
        print("control, which decides nothing:", flush=True)
    print_comparison(one.comparison, show_all=show_all)
