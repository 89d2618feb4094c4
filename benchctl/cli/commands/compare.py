"""``benchctl compare``: the verdict on B against A."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.options.completion import complete_results
from benchctl.cli.output.screen import uncollected
from benchctl.errors import InvalidDataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchctl.analysis.compare.compare import CompareOptions
    from benchctl.analysis.compare.result import Comparison
    from benchctl.analysis.experiment.experiment import Experiment
    from benchctl.analysis.statistics.block_ratio import Estimator
    from benchctl.records.noise import MetricNoise


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
        help="Also write the comparison to a file: .json, .md, .csv, .html for the whole page, or .png for a "
        "picture of ratios and intervals; repeat as needed.",
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
    from benchctl.cli.output.comparison import (
        PAGE,
        append,
        checked_outputs,
        summary_path,
        write_comparison,
        write_page,
    )
    from benchctl.report.text.comparison_markdown import markdown_of

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
    from benchctl.analysis.compare.unpaired import compare_paths
    from benchctl.analysis.compare.unpaired_sides import is_unpaired
    from benchctl.cli.output.comparison import write_refusal
    from benchctl.report.documents.comparison import refusal_document

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
    from benchctl.cli.output.comparison import print_comparison
    from benchctl.report.documents.comparison import document_of
    from benchctl.report.text.comparison_markdown import markdown_of

    if as_json:
        print(json.dumps(document_of(comparison), indent=1, allow_nan=False))
    elif as_markdown:
        print(markdown_of(comparison, show_all=show_all))
    else:
        print_comparison(comparison, show_all=show_all)


def _estimator(name: str | None) -> "Estimator | None":
    from benchctl.analysis.statistics.block_ratio import ESTIMATORS

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
