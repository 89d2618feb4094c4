"""``benchctl compare``: the verdict on B against A.

A comparison on the screen and in files, whose format follows from the suffix.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import typer

from benchctl.analysis.compare.compare import CompareOptions, compare_experiments, deciding_metrics, load_sides
from benchctl.analysis.compare.foreign import compare_paths, is_unpaired, runs_of_side
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.words import verdict_sentence
from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.experiment.pairing import Side, parse_side
from benchctl.analysis.planning import noise_of_experiment
from benchctl.analysis.statistics.estimate import ESTIMATORS, Estimator
from benchctl.analysis.summary.analyzed import analyze, analyze_directory
from benchctl.cli.options.compare import (
    AllowAltered,
    AllowDifference,
    AllowFailed,
    AllowSuspect,
    AsJson,
    AsMarkdown,
    Confidence,
    EquivalenceMargin,
    EstimatorName,
    GithubSummary,
    JudgeName,
    Metrics,
    NoiseFloor,
    Output,
    QualityMargin,
    ShowAll,
    SideA,
    SideB,
    StepTimeModel,
    Threshold,
)
from benchctl.cli.screen import PICTURE_SUFFIXES, uncollected, verdict_text, wide_console
from benchctl.errors import InvalidDataError, RecordError, UsageError
from benchctl.interop.readers.files import is_foreign
from benchctl.records.directory import open_results
from benchctl.records.files import write_bytes_atomic
from benchctl.records.noise import MetricNoise
from benchctl.report.charts.forest import forest_plot
from benchctl.report.documents import (
    comparison_csv,
    comparisons_csv,
    document_of,
    refusal_document,
    verdict_document,
)
from benchctl.report.page.foreign import ForeignSides
from benchctl.report.page.page import directory_page, files_page, sides_page
from benchctl.report.page.verdict import ComparisonVerdict, PageVerdict, directory_verdict
from benchctl.report.table import fenced, markdown_text
from benchctl.report.tables.compare import MOST_CHARACTERS, comparison_tables, footnotes_of, markdown_of
from benchctl.untrusted.text import visible_line

Contents: TypeAlias = Mapping[str, Callable[[], str | bytes]]
"""What is written, by the suffix of the file."""


@uncollected()
def compare(
    a: SideA,
    b: SideB = None,
    threshold: Threshold = "1%",
    equivalence_margin: EquivalenceMargin = None,
    estimator: EstimatorName = None,
    confidence: Confidence = 0.95,
    metrics: Metrics = None,
    allow_difference: AllowDifference = None,
    noise_floor: NoiseFloor = None,
    allow_failed: AllowFailed = False,
    allow_suspect: AllowSuspect = False,
    allow_altered: AllowAltered = False,
    judge: JudgeName = None,
    quality_margin: QualityMargin = None,
    step_time_model: StepTimeModel = None,
    show_all: ShowAll = False,
    output: Output = None,
    github_summary: GithubSummary = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Compare two sides block by block. The verdict is regression, improvement, equivalent or inconclusive.

    With one directory, every other variant is compared with its baseline, as on its page. Exit code: 0 improvement
    or equivalent, 1 regression, 2 wrong usage, 3 inconclusive, 4 not comparable or invalid; of several comparisons
    4 if any has it, then 1, 3 and 0. Example: benchctl compare results/x:baseline results/x:guided
    """
    if as_json and as_markdown:
        raise UsageError("--json and --markdown exclude each other; give one of the two")
    if b is None and (baseline := baseline_side(a)) is not None:
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
    form = "json" if as_json else "markdown" if as_markdown else "table"
    if b is None:
        raise typer.Exit(compare_directory(Path(a), options, outputs, summary, form=form, show_all=show_all))
    comparison, loaded = _compare_or_write_refusal(a, b, options, outputs, summary, as_json=as_json)
    contents: Contents = {
        ".json": lambda: _json_text(document_of(comparison)),
        ".md": lambda: f"{markdown_of(comparison, show_all=show_all)}\n",
        ".csv": partial(comparison_csv, comparison),
        **{suffix: partial(_picture, [comparison], suffix) for suffix in PICTURE_SUFFIXES},
        PAGE: lambda: page_of_sides(a, b, options, comparison, loaded)[0],
    }
    if _tell(contents, outputs, summary, form):
        print_comparison(comparison, show_all=show_all)
    raise typer.Exit(comparison.exit_code)


def _tell(contents: Contents, outputs: Sequence[Path], summary: Path | None, form: str) -> bool:
    """Write all outputs, and print JSON or Markdown; True where the caller prints the table instead."""
    for path in outputs:
        content = contents[path.suffix]()
        write_bytes_atomic(path, content.encode() if isinstance(content, str) else content)
    if summary is not None:
        _append(summary, str(contents[".md"]()))
    if form != "table":
        print(contents[".json" if form == "json" else ".md"](), end="")
    return form == "table"


def _json_text(document: object) -> str:
    return f"{json.dumps(document, indent=1, allow_nan=False)}\n"


def _picture(comparisons: Sequence[Comparison], suffix: str) -> bytes:
    if len(comparisons) != 1:
        raise UsageError(
            f"a picture shows one comparison, and these are {len(comparisons)}; name two sides, or a file that "
            "ends in .html"
        )
    return forest_plot(comparisons[0], suffix)


def _compare_or_write_refusal(
    a: str, b: str, options: CompareOptions, outputs: tuple[Path, ...], summary: Path | None, *, as_json: bool
) -> tuple[Comparison, tuple[Experiment, ...]]:
    """Compare the sides; also returns the experiments of directories.

    If they cannot be compared, writes the reason to all outputs and raises InvalidDataError.
    """
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


def _estimator(name: str | None) -> Estimator | None:

    estimator = next((estimator for estimator in ESTIMATORS if estimator == name), None)
    if name is not None and estimator is None:
        raise UsageError(f"unknown estimator {name!r}; choose {' or '.join(ESTIMATORS)}")
    return estimator


def _noise(option: str | None) -> Mapping[str, MetricNoise] | None:
    if option is None:
        return None
    if option == "none":
        return {}

    return noise_of_experiment(load_experiment(Path(option))).metrics


def parse_threshold(text: str, option: str = "--threshold") -> float:
    """``1%`` or ``0.01`` as a fraction; ``option`` is the option for the message of an error."""
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"{option} is {text!r}; write a percentage or a fraction: 1% or 0.01") from None


PAGE: Final = ".html"
SUFFIXES: Final = (".json", ".md", ".csv", *PICTURE_SUFFIXES, PAGE)
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


def page_of_sides(
    a: str,
    b: str,
    options: CompareOptions,
    comparison: Comparison | None = None,
    loaded: Sequence[Experiment] = (),
) -> tuple[bytes, tuple[str, ...]]:
    """The page on two sides, and descriptions of damaged files.

    ``comparison`` is that of the sides where it was already made, ``loaded`` their experiments where it was of
    directories.
    """
    if is_unpaired(a, b):
        comparison = comparison or compare_paths(a, b, options)
        a_runs, b_runs = (runs_of_side(side, allow_suspect=options.allow_suspect) for side in (a, b))
        sides = ForeignSides(a_name=comparison.a_name, b_name=comparison.b_name, a=a_runs, b=b_runs)
        return files_page(comparison, sides).encode(), ()
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
    page = sides_page((a_analysis, a_side), (b_analysis, b_side), options, comparison)
    return page.encode(), tuple(dict.fromkeys((*a_analysis.damage, *b_analysis.damage)))


def write_refusal(error: InvalidDataError, outputs: Sequence[Path], summary: Path | None) -> None:
    """Write the reason why nothing was compared to JSON and Markdown; other formats cannot express it."""
    message = f"**not compared: {markdown_text(str(error).splitlines()[0])}**\n\n{fenced(str(error))}"
    for path in outputs:
        if path.suffix == ".json":
            write_bytes_atomic(path, f"{json.dumps(refusal_document(error), indent=1)}\n".encode())
        elif path.suffix == ".md":
            write_bytes_atomic(path, f"{message}\n".encode())
    if summary is not None:
        _append(summary, f"{message}\n")


def _append(path: Path, text: str) -> None:
    """Append to a job's summary, which other steps write, too."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def print_comparison(comparison: Comparison, *, show_all: bool = False) -> None:
    """Print the verdict, the table, the decomposition of the time, then the footnotes."""
    console = wide_console()
    console.print(verdict_text(verdict_sentence(comparison), "bold"))
    console.print()
    for table in comparison_tables(comparison, show_all=show_all):
        console.print(table.drawn(lambda text: verdict_text(visible_line(text, MOST_CHARACTERS))))
        console.print()
    for line in footnotes_of(comparison):
        console.print(visible_line(line))


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
    comparisons = {one.sides: one.comparison for one in verdict.all if one.comparison is not None}
    contents: Contents = {
        ".json": lambda: _json_text(verdict_document(verdict)),
        ".md": lambda: f"{_markdown_of_all(verdict, show_all=show_all)}\n",
        ".csv": partial(comparisons_csv, comparisons),
        **{suffix: partial(_picture, list(comparisons.values()), suffix) for suffix in PICTURE_SUFFIXES},
        PAGE: partial(directory_page, analysis, verdict=verdict, is_inside=False),
    }
    if _tell(contents, outputs, summary, form):
        _print_all(verdict, show_all=show_all)
    return verdict.exit_code


def _headline(verdict: PageVerdict) -> str | None:
    """The verdict of the whole, where it is not that of a single comparison."""
    return f"{verdict.word}: {verdict.sentence}" if len(verdict.all) > 1 else None


def _markdown_of_all(verdict: PageVerdict, *, show_all: bool) -> str:
    parts = [f"**{markdown_text(headline)}**" for headline in [_headline(verdict)] if headline is not None]
    for one in verdict.all:
        if one.comparison is None:
            sentence = markdown_text(f"{one.word}: {one.sentence}")
            parts.append(f"**{sentence}**\n\n{fenced(one.problem or '')}")
        else:
            parts.append(markdown_of(one.comparison, show_all=show_all))
    return "\n\n".join(parts)


def _print_all(verdict: PageVerdict, *, show_all: bool) -> None:
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
