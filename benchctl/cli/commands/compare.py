"""``benchctl compare``: the verdict on B against A.

A comparison on the screen and in files, whose format follows from the suffix.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table

from benchctl.analysis.compare.compare import CompareOptions
from benchctl.analysis.compare.foreign import is_unpaired
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.words import verdict_sentence
from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.cli.options.options import complete_results
from benchctl.cli.screen import PICTURE_SUFFIXES, uncollected, verdict_text, wide_console
from benchctl.errors import InvalidDataError, UsageError
from benchctl.records.files import write_bytes_atomic
from benchctl.report.documents.documents import document_of, refusal_document
from benchctl.report.tables.compare import (
    decomposition_headings,
    decomposition_rows,
    fenced,
    footnotes_of,
    headings_of,
    markdown_of,
    markdown_text,
    rows_of,
)
from benchctl.report.tables.experiment import TITLE as NODES_TITLE
from benchctl.report.tables.experiment import node_headings, node_rows
from benchctl.report.text.acceptance_table import TITLE, acceptance_headings, acceptance_rows, compared_drafts
from benchctl.untrusted.text import visible_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchctl.analysis.statistics.estimate import Estimator
    from benchctl.records.stores.peaks_store import MetricNoise


_A = Annotated[
    str,
    typer.Argument(
        metavar="A",
        help="The reference: DIR, or DIR:variant, where an archive may stand for DIR; or result files of vLLM, "
        "SGLang, AIPerf or GuideLLM: FILE, FILE,FILE, or a DIR of such files. Alone, DIR compares every variant "
        "with its baseline.",
        autocompletion=complete_results,
    ),
]
_B = Annotated[
    str | None,
    typer.Argument(
        metavar="[B]",
        help="The side to judge, given in the same way; without it, every variant of A against its baseline.",
        autocompletion=complete_results,
    ),
]
_Threshold = Annotated[
    str,
    typer.Option(
        "--threshold",
        help="Smallest change that counts: 1% or 0.01. Larger noise on file for this machine raises it for "
        "changes, not for equivalence.",
    ),
]
_EquivalenceMargin = Annotated[
    str | None,
    typer.Option(
        "--equivalence-margin",
        metavar="TEXT",
        help="Margin for equivalence, if it differs from the threshold: 2% or 0.02.",
    ),
]
_EstimatorName = Annotated[
    str | None,
    typer.Option(
        "--estimator",
        metavar="NAME",
        help="How to average blocks: robust or mean; by default as in the profile. Choose before you see results.",
    ),
]
_Confidence = Annotated[float, typer.Option("--confidence", help="Confidence level of the intervals.")]
_Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        help="Deciding metrics, separated by commas; by default those of the profile that both sides record.",
    ),
]
_AllowDifference = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-difference",
        metavar="PATTERN",
        help="A setting in which the sides may differ, beside what variants set and the profile allows, such as "
        "server.*; repeat as needed.",
    ),
]
_NoiseFloor = Annotated[
    str | None,
    typer.Option(
        "--noise-floor",
        metavar="DIR|none",
        help="Result of an A/A experiment whose noise a change must exceed, instead of the noise on file; none: "
        "only --threshold counts.",
    ),
]
_AllowFailed = Annotated[
    bool, typer.Option("--allow-failed", help="Judge the completed requests even if others failed.")
]
_AllowSuspect = Annotated[
    bool, typer.Option("--allow-suspect", help="Include suspect runs; their warnings are printed with the verdict.")
]
_AllowAltered = Annotated[
    bool, typer.Option("--allow-altered", help="Compare files even if they were altered after the measurement.")
]
_Judge = Annotated[
    str | None,
    typer.Option(
        "--judge",
        metavar="NAME",
        help="How to check answers: against gold answers with numeric or math-verify, or by being JSON with json.",
        show_default="numeric; json where requests ask for JSON without gold answers",
    ),
]
_QualityMargin = Annotated[
    float | None,
    typer.Option(
        "--quality-margin",
        metavar="POINTS",
        help="Acceptable loss of accuracy in percentage points; quality then counts for the verdict.",
    ),
]
_StepTimeModel = Annotated[
    Path | None,
    typer.Option(
        "--step-time-model",
        metavar="FILE",
        help="Model of 'benchctl steptime fit' that explains the change of the mean step; by default that of the "
        "profile, else one fitted to the baseline's own steps.",
    ),
]
_ShowAll = Annotated[bool, typer.Option("--all", help="Show all exploratory metrics.")]
_Output = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write the comparison to a file: .json, .md, .csv, .html for the whole page, or .png, "
        ".svg or .pdf for a picture of ratios and intervals; repeat as needed.",
    ),
]
_GithubSummary = Annotated[
    bool, typer.Option("--github-summary", help="Also append Markdown to the summary of a GitHub Actions job.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")]
_AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]


@uncollected()
def compare(
    a: _A,
    b: _B = None,
    threshold: _Threshold = "1%",
    equivalence_margin: _EquivalenceMargin = None,
    estimator: _EstimatorName = None,
    confidence: _Confidence = 0.95,
    metrics: _Metrics = None,
    allow_difference: _AllowDifference = None,
    noise_floor: _NoiseFloor = None,
    allow_failed: _AllowFailed = False,
    allow_suspect: _AllowSuspect = False,
    allow_altered: _AllowAltered = False,
    judge: _Judge = None,
    quality_margin: _QualityMargin = None,
    step_time_model: _StepTimeModel = None,
    show_all: _ShowAll = False,
    output: _Output = None,
    github_summary: _GithubSummary = False,
    as_json: _AsJson = False,
    as_markdown: _AsMarkdown = False,
) -> None:
    """Compare two sides block by block. The verdict is regression, improvement, equivalent or inconclusive.

    With one directory, every other variant is compared with its baseline, as on its page. Exit code: 0 improvement
    or equivalent, 1 regression, 2 wrong usage, 3 inconclusive, 4 not comparable or invalid; of several comparisons
    4 if any has it, then 1, 3 and 0. Example: benchctl compare results/x:baseline results/x:guided
    """
    from benchctl.analysis.compare.compare import CompareOptions
    from benchctl.report.tables.compare import markdown_of

    if as_json and as_markdown:
        raise UsageError("--json and --markdown exclude each other; give one of the two")
    if b is None:
        from benchctl.cli.directory_comparison import baseline_side, compare_directory

        if (baseline := baseline_side(a)) is not None:
            a, b = baseline, a
    outputs, summary = checked_outputs(output or ()), summary_path() if github_summary else None
    options = CompareOptions(
        margin_frac=parse_threshold(threshold),
        equivalence_margin_frac=(
            None if equivalence_margin is None else parse_threshold(equivalence_margin, "--equivalence-margin")
        ),
        estimator=_estimator(estimator),
        confidence=confidence,
        metrics=tuple(name.strip() for name in metrics.split(",")) if metrics is not None else (),
        allow=tuple(allow_difference or ()),
        allow_failed=allow_failed,
        allow_suspect=allow_suspect,
        allow_altered=allow_altered,
        noise=_noise(noise_floor),
        noise_source=noise_floor or "",
        judge=judge,
        quality_margin_points=quality_margin,
        step_time_model=step_time_model,
    )
    if b is None:
        form = "json" if as_json else "markdown" if as_markdown else "table"
        raise typer.Exit(compare_directory(Path(a), options, outputs, summary, form=form, show_all=show_all))
    comparison, loaded = _compare_or_write_refusal(a, b, options, outputs, summary, as_json=as_json)
    for path in outputs:
        if path.suffix == PAGE:
            write_page(a, b, options, path, comparison, loaded)
        else:
            write_comparison(comparison, path, show_all=show_all)
    if summary is not None:
        append(summary, markdown_of(comparison, show_all=show_all))
    _print(comparison, as_json=as_json, as_markdown=as_markdown, show_all=show_all)
    raise typer.Exit(comparison.exit_code)


def _compare_or_write_refusal(
    a: str, b: str, options: "CompareOptions", outputs: tuple[Path, ...], summary: Path | None, *, as_json: bool
) -> "tuple[Comparison, tuple[Experiment, ...]]":
    """Compare the sides; also returns the experiments of directories.

    If they cannot be compared, writes the reason to all outputs and raises InvalidDataError.
    """
    from benchctl.analysis.compare.compare import compare_experiments, load_sides, parse_side
    from benchctl.analysis.compare.foreign import compare_paths, is_unpaired
    from benchctl.report.documents.documents import refusal_document

    try:
        if is_unpaired(a, b):
            return compare_paths(a, b, options), ()
        sides = load_sides(parse_side(a), parse_side(b), options)
        return compare_experiments(*sides, options), tuple(experiment for experiment, _ in sides)
    except InvalidDataError as error:
        write_refusal(error, outputs, summary)
        if as_json:
            print(json.dumps(refusal_document(error), indent=1))
        raise


def _print(comparison: "Comparison", *, as_json: bool, as_markdown: bool, show_all: bool) -> None:
    from benchctl.report.documents.documents import document_of
    from benchctl.report.tables.compare import markdown_of

    if as_json:
        print(json.dumps(document_of(comparison), indent=1, allow_nan=False))
    elif as_markdown:
        print(markdown_of(comparison, show_all=show_all))
    else:
        print_comparison(comparison, show_all=show_all)


def _estimator(name: str | None) -> "Estimator | None":
    from benchctl.analysis.statistics.estimate import ESTIMATORS

    estimator = next((estimator for estimator in ESTIMATORS if estimator == name), None)
    if name is not None and estimator is None:
        raise UsageError(f"unknown estimator {name!r}; choose {' or '.join(ESTIMATORS)}")
    return estimator


def _noise(option: str | None) -> "Mapping[str, MetricNoise] | None":
    if option is None:
        return None
    if option == "none":
        return {}
    from benchctl.analysis.experiment.experiment import load_experiment
    from benchctl.analysis.planning.noise_floor import noise_of_experiment

    return noise_of_experiment(load_experiment(Path(option))).metrics


def parse_threshold(text: str, option: str = "--threshold") -> float:
    """``1%`` or ``0.01`` as a fraction; ``option`` is the option for the message of an error."""
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"{option} is {text!r}; write a percentage or a fraction: 1% or 0.01") from None


PAGE: Final = ".html"
SUFFIXES: Final = (".json", ".md", ".csv", *PICTURE_SUFFIXES, PAGE)
_MOST_CHARACTERS: Final = 200
"""A field of a table with a longer label would push the numbers away."""
_SUMMARY: Final = "GITHUB_STEP_SUMMARY"


def checked_outputs(outputs: Sequence[Path]) -> tuple[Path, ...]:
    """Check the paths before any work. Raises UsageError for an unknown suffix or a missing directory."""
    for path in outputs:
        if path.suffix not in SUFFIXES:
            raise UsageError(f"--output {path}: unknown suffix; name a file that ends in {', '.join(SUFFIXES)}")
        if not path.parent.is_dir():
            raise UsageError(f"--output {path}: {path.parent} is not a directory; create it first")
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
    from benchctl.analysis.summary.analyzed import analyze, analyze_directory
    from benchctl.report.page.page import sides_page

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
    from benchctl.analysis.compare.foreign import compare_paths, runs_of_side
    from benchctl.report.page.foreign import ForeignSides
    from benchctl.report.page.page import files_page

    comparison = compare_paths(a, b, options) if comparison is None else comparison
    a_runs, b_runs = (runs_of_side(side, allow_suspect=options.allow_suspect) for side in (a, b))
    sides = ForeignSides(a_name=comparison.a_name, b_name=comparison.b_name, a=a_runs, b=b_runs)
    write_bytes_atomic(path, files_page(comparison, sides).encode())


def _content(comparison: Comparison, suffix: str, *, show_all: bool) -> bytes:
    if suffix in PICTURE_SUFFIXES:
        from benchctl.report.charts.forest import forest_plot

        return forest_plot(comparison, suffix)
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
