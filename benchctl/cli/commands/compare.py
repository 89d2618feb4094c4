"""``benchctl compare``: the verdict on B against A, on the screen and in files whose suffix is their format."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import typer

from benchctl.analysis.analyzed import analyze, analyze_directory
from benchctl.analysis.compare.answer import answer_lines, change_in_words, verdict_sentence
from benchctl.analysis.compare.compare import CompareOptions, compare_experiments, load_sides
from benchctl.analysis.compare.noise_words import noise_sentence
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.experiment.pairing import Side, parse_side
from benchctl.analysis.experiment.scatter import scatter_by_metric
from benchctl.analysis.foreign import compare_paths, is_unpaired, runs_of_side
from benchctl.analysis.metrics.table import deciding_metrics
from benchctl.analysis.planning import noise_of_experiment, precision_of
from benchctl.cli.baseline import has_baseline, keep_baseline
from benchctl.cli.options import AsJson, complete_results, results_named
from benchctl.cli.screen import PICTURE_SUFFIXES, note, say_verdict, text_console, uncollected, verdict_text, warn
from benchctl.errors import InvalidDataError, RecordError, UsageError
from benchctl.interop.foreign_readers import is_foreign
from benchctl.records.directory import open_results
from benchctl.records.files import write_bytes_atomic
from benchctl.records.stores import MetricNoise
from benchctl.report.comparison_tables import MOST_CHARACTERS, comparison_tables, footnotes_of, markdown_of
from benchctl.report.documents import (
    comparison_csv,
    comparisons_csv,
    document_of,
    refusal_document,
    verdict_document,
)
from benchctl.report.page.page import directory_page, files_page, sides_page
from benchctl.report.page.plots import forest_plot
from benchctl.report.table import fenced, markdown_text
from benchctl.report.verdicts import PageVerdict, directory_verdict, page_verdict, verdict_of
from benchctl.units import fraction
from benchctl.untrusted.text import visible_line

Contents: TypeAlias = Mapping[str, Callable[[], bytes]]
"""What is written, by the suffix of the file."""
SUFFIXES: Final = (".json", ".md", ".csv", *PICTURE_SUFFIXES, ".html")
_SUMMARY: Final = "GITHUB_STEP_SUMMARY"


_SideA = Annotated[
    str,
    typer.Argument(
        metavar="A",
        help="The reference: DIR, or DIR:variant; or result files of vLLM, "
        "SGLang, AIPerf or GuideLLM: FILE, FILE,FILE, or a DIR of such files. Alone, DIR compares every variant "
        "with its baseline.",
        autocompletion=complete_results,
    ),
]
_SideB = Annotated[
    str | None,
    typer.Argument(
        metavar="[B]",
        help="The side to judge, given in the same way; without it, every variant of A against its baseline.",
        autocompletion=complete_results,
    ),
]
_Threshold = Annotated[
    str | None,
    typer.Option(
        "--threshold",
        help="Smallest change that counts: 1% or 0.01. Larger noise on file for this machine raises it for "
        "changes, not for equivalence.",
        show_default="comparison.threshold of the profile, else 1%",
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
    Literal["robust", "mean"] | None,
    typer.Option(
        "--estimator",
        metavar="NAME",
        help="How to average blocks: robust or mean; by default as in the profile. Choose before you see results.",
    ),
]
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
_JudgeName = Annotated[
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
        "profile.",
    ),
]
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
_KeptBaseline = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        metavar="DIR",
        help="Compare A with the result directory that is kept at DIR; where there is none, keep A there.",
    ),
]
_Refresh = Annotated[
    bool, typer.Option("--refresh", help="Keep A as the new --baseline, whatever the verdict; ends with 0.")
]
_GithubSummary = Annotated[
    bool, typer.Option("--github-summary", help="Also append Markdown to the summary of a GitHub Actions job.")
]


@uncollected()
def compare(
    a: _SideA,
    b: _SideB = None,
    baseline: _KeptBaseline = None,
    refresh: _Refresh = False,
    threshold: _Threshold = None,
    equivalence_margin: _EquivalenceMargin = None,
    estimator: _EstimatorName = None,
    confidence: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.95,
    metrics: _Metrics = None,
    allow_difference: _AllowDifference = None,
    noise_floor: _NoiseFloor = None,
    allow_failed: _AllowFailed = False,
    allow_suspect: _AllowSuspect = False,
    allow_altered: Annotated[
        bool, typer.Option("--allow-altered", help="Compare files even if they were altered after the measurement.")
    ] = False,
    judge: _JudgeName = None,
    quality_margin: _QualityMargin = None,
    step_time_model: _StepTimeModel = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show all exploratory metrics.")] = False,
    output: _Output = None,
    github_summary: _GithubSummary = False,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> None:
    """Compare two sides block by block. The verdict is regression, improvement, equivalent or inconclusive.

    With one directory, every other variant is compared with its baseline, as on its page. Exit code: 0 improvement
    or equivalent, 1 regression, 2 wrong usage, 3 inconclusive, 4 not comparable or invalid; of several comparisons
    4 if any has it, then 1, 3 and 0. Example: benchctl compare results/x:baseline results/x:guided
    """
    if as_json and as_markdown:
        raise UsageError("--json and --markdown exclude each other; give one of the two")
    a, b = results_named(a), None if b is None else results_named(b)
    if baseline is None and refresh:
        raise UsageError("--refresh keeps A as the new baseline: name its directory with --baseline")
    if baseline is not None:
        if b is not None:
            raise UsageError("with --baseline there is one side: leave out B")
        a, b = str(baseline), a
    write = partial(_write, outputs=_checked(output or ()), summary=_summary_path() if github_summary else None)
    options = CompareOptions(
        margin_frac=None if threshold is None else parse_threshold(threshold),
        equivalence_margin_frac=(
            None if equivalence_margin is None else parse_threshold(equivalence_margin, "--equivalence-margin")
        ),
        estimator=estimator,
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
    form = ".json" if as_json else ".md" if as_markdown else None
    if baseline is not None and not has_baseline(baseline):
        write(_news(_keep(str(b), baseline), baseline), printed=form or ".txt")
        return
    try:
        verdict, contents = _judged(a, b, options, show_all=show_all)
        write(contents, printed=form)
        if form is None:
            _print(verdict, show_all=show_all)
            print(end=f"precision: {verdict.precision}\n" if verdict.precision else "")
        exit_code = verdict.exit_code
    except InvalidDataError as error:
        write(_refusal(error), printed=".json" if as_json else None)
        if not refresh:
            raise
        warn(str(error))
    if refresh and baseline is not None:
        note(_keep(str(b), baseline))
        exit_code = 0
    raise typer.Exit(exit_code)


def _keep(results: str, baseline: Path) -> str:
    """Keep a result directory as the baseline of later ones; returns the sentence on it."""
    keep_baseline(Path(results), baseline)
    return f"{results} is kept as the baseline: {baseline}"


def _news(text: str, baseline: Path) -> Contents:
    """The sentence on a baseline that was kept without a comparison, in every form that can say it."""
    document = {"verdict": "kept", "exit_code": 0, "summary": text, "baseline": str(baseline)}
    return {
        ".json": lambda: _json_bytes(document),
        ".md": f"**{markdown_text(text)}**\n".encode,
        ".txt": f"{text}\n".encode,
    }


def parse_threshold(text: str, option: str = "--threshold") -> float:
    """``1%`` or ``0.01`` as a fraction; ``option`` is the option for the message of an error."""
    try:
        return fraction(text)
    except ValueError:
        raise UsageError(f"{option} is {text!r}; write a percentage or a fraction: 1% or 0.01") from None


def _noise(option: str | None) -> Mapping[str, MetricNoise] | None:
    if option is None:
        return None
    return {} if option == "none" else noise_of_experiment(load_experiment(Path(option))).metrics


def _checked(outputs: Sequence[Path]) -> Sequence[Path]:
    """Check the paths before any work. Raises UsageError for an unknown suffix or a missing directory."""
    for path in outputs:
        if path.suffix not in SUFFIXES:
            raise UsageError(f"--output {path}: unknown suffix; name a file that ends in {', '.join(SUFFIXES)}")
        if not path.parent.is_dir():
            raise UsageError(f"--output {path}: {path.parent} is not a directory; create it first")
    return outputs


def _summary_path() -> Path:
    """The file that the job's environment names. Raises UsageError without one."""
    if not os.environ.get(_SUMMARY):
        raise UsageError(
            f"--github-summary appends to the file named by {_SUMMARY}, which is not set; outside a job of GitHub "
            "Actions use --output FILE.md instead"
        )
    return Path(os.environ[_SUMMARY])


def _judged(a: str, b: str | None, options: CompareOptions, *, show_all: bool) -> tuple[PageVerdict, Contents]:
    """The verdict on every other variant of one directory, or on B against A, and what files say of it.

    With one side that names a variant, that variant is B and the baseline of its directory is A.
    """
    if b is None and (baseline := _baseline_beside(a)) is not None:
        a, b = baseline, a
    verdict, page = _judge_directory(Path(a), options) if b is None else _judge_sides(a, b, options)
    is_pair, comparisons = b is not None, verdict.comparisons
    return verdict, {
        ".json": lambda: _json_bytes(document_of(comparisons[0]) if is_pair else verdict_document(verdict)),
        ".md": lambda: _markdown(verdict, show_all=show_all),
        ".csv": lambda: (
            comparison_csv(comparisons[0])
            if is_pair
            else comparisons_csv({one.sides: one.comparison for one in verdict.all if one.comparison})
        ),
        ".html": lambda: page().encode(),
        **{suffix: partial(_picture, comparisons, suffix) for suffix in PICTURE_SUFFIXES},
    }


def _picture(comparisons: Sequence[Comparison], suffix: str) -> bytes:
    if len(comparisons) != 1:
        raise UsageError(
            f"a picture shows one comparison, and these are {len(comparisons)}; name two sides, or a file that "
            "ends in .html"
        )
    return forest_plot(comparisons[0], suffix)


def _json_bytes(document: object) -> bytes:
    return f"{json.dumps(document, indent=1, allow_nan=False)}\n".encode()


def _baseline_beside(text: str) -> str | None:
    """The baseline of the directory where ``text`` names one variant of it (``DIR:variant``); None for all of it.

    Raises UsageError for files of another tool, which have no baseline.
    """
    if is_foreign(text):
        raise UsageError(f"{text} holds results of another tool: name the side to judge as well, as B")
    side = parse_side(text)
    return side.variant and str(Side(side.path, open_results(side.path).manifest().baseline))


def _judge_directory(path: Path, options: CompareOptions) -> tuple[PageVerdict, Callable[[], str]]:
    """The verdict on a directory, and its page.

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
    return verdict, partial(directory_page, analysis, verdict=verdict, is_inside=False)


def _judge_sides(a: str, b: str, options: CompareOptions) -> tuple[PageVerdict, Callable[[], str]]:
    loaded: list[Experiment] = []
    if is_unpaired(a, b):
        comparison = compare_paths(a, b, options)
    else:
        sides = load_sides(parse_side(a), parse_side(b), options)
        comparison, loaded = compare_experiments(*sides, options), [experiment for experiment, _ in sides]
    verdict = page_verdict([verdict_of(comparison)], comparison.a_name)
    if loaded and comparison.pairing == "interleaved":
        verdict = replace(verdict, precision=precision_of(loaded[0], scatter_by_metric(loaded[0])))
    return verdict, lambda: page_of_sides(a, b, options, comparison, loaded)[0]


def page_of_sides(
    a: str,
    b: str,
    options: CompareOptions,
    comparison: Comparison | None = None,
    loaded: Sequence[Experiment] = (),
) -> tuple[str, tuple[str, ...]]:
    """The page on two sides, and why they cannot be compared, if so, before descriptions of damaged files.

    ``comparison`` is that of the sides where it was already made, ``loaded`` their experiments where it was of
    directories.
    """
    if is_unpaired(a, b):
        comparison = comparison or compare_paths(a, b, options)
        a_runs, b_runs = (runs_of_side(side, allow_suspect=options.allow_suspect) for side in (a, b))
        return files_page(comparison, ((comparison.a_name, a_runs), (comparison.b_name, b_runs))), ()
    sides = parse_side(a), parse_side(b)
    is_one = sides[0].path.resolve() == sides[1].path.resolve()
    analyses = [
        analyze(loaded[i]) if loaded else analyze_directory(side.path, allow_suspect=options.allow_suspect)
        for i, side in enumerate(sides[:1] if is_one else sides)
    ]
    analyzed = (analyses[0], sides[0]), (analyses[-1], sides[1])
    for analysis, side in analyzed:
        variants = dict.fromkeys(planned.variant for planned in analysis.results.plan.runs)
        if variants and side.variant not in {None, *variants}:
            raise UsageError(f"{side.path} has no variant {side.variant!r}; it has {', '.join(variants)}")
    damage = dict.fromkeys(line for analysis in analyses for line in analysis.damage)
    page, verdict = sides_page(*analyzed, options, comparison)
    return page, tuple(filter(None, (verdict.problem, *damage)))


def _refusal(error: InvalidDataError) -> Contents:
    """The reason why nothing was compared, as JSON and Markdown; other formats cannot express it."""
    text = _titled(f"not compared: {str(error).splitlines()[0]}", str(error))
    return {".json": lambda: _json_bytes(refusal_document(error)), ".md": f"{text}\n".encode}


def _write(contents: Contents, *, outputs: Sequence[Path], summary: Path | None, printed: str | None) -> None:
    """Write all files that the contents can express, append to a job's summary, and print one of the forms."""
    for path in outputs:
        if path.suffix in contents:
            write_bytes_atomic(path, contents[path.suffix]())
    if summary is not None:  # which other steps write, too
        with summary.open("ab") as file:
            file.write(contents[".md"]())
    if printed is not None:
        print(contents[printed]().decode(), end="")


def _markdown(verdict: PageVerdict, *, show_all: bool) -> bytes:
    parts = [f"**{markdown_text(f'{verdict.word}: {verdict.sentence}')}**"] if len(verdict.all) > 1 else []
    parts += [
        _titled(f"{one.word}: {one.sentence}", one.problem or "")
        if one.comparison is None
        else markdown_of(one.comparison, show_all=show_all)
        for one in verdict.all
    ]
    return ("\n\n".join(parts) + "\n").encode()


def _titled(line: str, text: str) -> str:
    return f"**{markdown_text(line)}**\n\n{fenced(text)}"


def _print(verdict: PageVerdict, *, show_all: bool) -> None:
    """Print the answer of each comparison; of a single one, and in all detail of every one, also its tables."""
    console, is_one = text_console(), len(verdict.all) == 1
    answers = {one.sides: list(answer_lines(one.comparison)) for one in verdict.all if one.comparison is not None}
    common = [] if is_one else _common_lines(verdict.comparisons, list(answers.values()))
    if not is_one or verdict.sentence != verdict.all[0].sentence:
        say_verdict(f"{verdict.word}: {verdict.sentence}", "bold")
        console.print(*common, "", sep="\n")
    for i, one in enumerate(verdict.all):
        if i and show_all:
            console.print()
        if one.is_control and one.comparison is not None:
            console.print("control, which decides nothing:")
        if one.comparison is None:
            console.print(f"{one.word}: {one.problem}")
            continue
        say_verdict(verdict_sentence(one.comparison), "bold" if is_one else "")
        for line in answers[one.sides]:
            if line not in common and (is_one or show_all or line.startswith(("changed", "cause"))):
                console.print(f"{'' if is_one else '  '}{line}")
        if is_one or show_all:
            _print_tables(one.comparison, show_all=show_all)
    if not is_one and not show_all:
        noise = [*filter(None, map(noise_sentence, verdict.comparisons))][:1]  # all have one baseline
        console.print("\n".join([*noise, "tables and warnings: --all, or name one variant as DIR:VARIANT"]))


def _common_lines(comparisons: Sequence[Comparison], answers: Sequence[Sequence[str]]) -> list[str]:
    """The change of all comparisons together, and the lines that their answers share."""
    shared = [line for line in answers[0] if all(line in lines for lines in answers)] if answers else []
    return [f"changed: {change_in_words(d for each in comparisons for d in each.allowed)}", *shared]


def _print_tables(comparison: Comparison, *, show_all: bool) -> None:
    """Print the tables, then the footnotes."""
    console = text_console()
    console.print()
    for table in comparison_tables(comparison, show_all=show_all):
        console.print(table.drawn(console.width, lambda text: verdict_text(visible_line(text, MOST_CHARACTERS))))
        console.print()
    for line in footnotes_of(comparison, show_all=show_all):
        console.print(visible_line(line))
