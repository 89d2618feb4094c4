"""``benchctl compare``: the verdict on B against A.

A comparison on the screen and in files, whose format follows from the suffix.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import typer

from benchctl.analysis.compare.compare import CompareOptions, compare_experiments, deciding_metrics, load_sides
from benchctl.analysis.compare.foreign import compare_paths, is_unpaired, runs_of_side
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.words import verdict_sentence
from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.experiment.pairing import Side, parse_side
from benchctl.analysis.planning.noise_floor import noise_of_experiment
from benchctl.analysis.statistics.estimate import ESTIMATORS, Estimator
from benchctl.analysis.summary.analyzed import AnalyzedExperiment, analyze, analyze_directory
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
from benchctl.cli.screen import drawable, uncollected, verdict_text, wide_console
from benchctl.errors import InvalidDataError, RecordError, UsageError
from benchctl.interop.readers.files import is_foreign
from benchctl.records.directory import open_results
from benchctl.records.files import write_bytes_atomic
from benchctl.records.stores.peaks_store import MetricNoise
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


def _print(comparison: Comparison, *, as_json: bool, as_markdown: bool, show_all: bool) -> None:

    if as_json:
        print(json.dumps(document_of(comparison), indent=1, allow_nan=False))
    elif as_markdown:
        print(markdown_of(comparison, show_all=show_all))
    else:
        print_comparison(comparison, show_all=show_all)


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
SUFFIXES: Final = (".json", ".md", ".csv", ".png", PAGE)
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

    comparison = compare_paths(a, b, options) if comparison is None else comparison
    a_runs, b_runs = (runs_of_side(side, allow_suspect=options.allow_suspect) for side in (a, b))
    sides = ForeignSides(a_name=comparison.a_name, b_name=comparison.b_name, a=a_runs, b=b_runs)
    write_bytes_atomic(path, files_page(comparison, sides).encode())


def _content(comparison: Comparison, suffix: str, *, show_all: bool) -> bytes:
    if suffix == ".png":
        from benchctl.report.plots.sweep import forest_plot

        return forest_plot(comparison)
    if suffix == ".csv":
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
    for output in outputs:
        write_bytes_atomic(output, _content_of_all(analysis, verdict, output, show_all=show_all))
    if summary is not None:
        append(summary, _markdown_of_all(verdict, show_all=show_all))
    if form == "json":
        print(json.dumps(verdict_document(verdict), indent=1, allow_nan=False))
    elif form == "markdown":
        print(_markdown_of_all(verdict, show_all=show_all))
    else:
        _print_all(verdict, show_all=show_all)
    return verdict.exit_code


def _content_of_all(analysis: AnalyzedExperiment, verdict: PageVerdict, output: Path, *, show_all: bool) -> bytes:
    comparisons = {one.sides: one.comparison for one in verdict.all if one.comparison is not None}
    if output.suffix == PAGE:
        return directory_page(analysis, verdict=verdict, is_inside=False).encode()
    if output.suffix == ".md":
        return f"{_markdown_of_all(verdict, show_all=show_all)}\n".encode()
    if output.suffix == ".csv":
        return comparisons_csv(comparisons)
    if output.suffix == ".png":
        from benchctl.report.plots.sweep import forest_plot

        if len(comparisons) != 1:
            raise UsageError(
                f"--output {output}: a picture shows one comparison, and these are {len(comparisons)}; name two "
                "sides, or a file that ends in .html"
            )
        return forest_plot(*comparisons.values())
    return f"{json.dumps(verdict_document(verdict), indent=1, allow_nan=False)}\n".encode()


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
