"""``benchctl compare``: is B worse than A, by how much, and is it real?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.collector import uncollected
from benchctl.errors import InvalidDataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchctl.analysis.compare.compare import CompareOptions
    from benchctl.analysis.compare.result import Comparison
    from benchctl.analysis.statistics.block_ratio import Estimator
    from benchctl.records.noise import MetricNoise


@uncollected()
def compare(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="What to compare with: DIR, or DIR:variant; or result files of vLLM, SGLang, AIPerf or GuideLLM: "
            "FILE, FILE,FILE, or a DIR of such files.",
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="What to judge, named in the same way.")],
    threshold: Annotated[
        str,
        typer.Option(
            "--threshold",
            help="Change that counts: 1% or 0.01. A change is called beyond it, or beyond the machine's own noise "
            "where that is on file and larger; equivalence is called inside it.",
        ),
    ] = "1%",
    equivalence_margin: Annotated[
        str | None,
        typer.Option(
            "--equivalence-margin",
            metavar="TEXT",
            help="Call equivalence inside this margin instead of the threshold: 2% or 0.02.",
        ),
    ] = None,
    estimator: Annotated[
        str | None,
        typer.Option(
            "--estimator",
            metavar="NAME",
            help="How blocks are averaged: robust or mean; that of the profile otherwise. Choose before looking.",
        ),
    ] = None,
    confidence: Annotated[float, typer.Option("--confidence", help="Confidence of the intervals.")] = 0.95,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", help="Metrics that decide, separated by commas; those of the profile otherwise."),
    ] = None,
    allow_difference: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-difference",
            metavar="PATTERN",
            help="A setting in which the sides may differ, beside those of the profile, such as server.*; "
            "repeat as needed.",
        ),
    ] = None,
    noise_floor: Annotated[
        str | None,
        typer.Option(
            "--noise-floor",
            metavar="DIR|none",
            help="An A/A experiment beyond whose noise a change is called, instead of the one on file; none: only "
            "--threshold.",
        ),
    ] = None,
    allow_failed: Annotated[
        bool, typer.Option("--allow-failed", help="Judge the requests that completed although others failed.")
    ] = False,
    allow_suspect: Annotated[
        bool,
        typer.Option(
            "--allow-suspect", help="Count runs that are suspect; their doubts are told beside the verdict."
        ),
    ] = False,
    allow_altered: Annotated[
        bool,
        typer.Option("--allow-altered", help="Judge files as they are although they are not what was measured."),
    ] = False,
    judge: Annotated[
        str, typer.Option("--judge", metavar="NAME", help="Of answers with a gold one: numeric or math-verify.")
    ] = "numeric",
    quality_margin: Annotated[
        float | None,
        typer.Option(
            "--quality-margin",
            metavar="POINTS",
            help="Percentage points of accuracy that may be lost; quality then decides, too.",
        ),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show every exploratory metric.")] = False,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also write the comparison to a file: .json, .md, .csv, .html for the whole page, or .png for a "
            "picture of ratios and intervals; repeat as needed.",
        ),
    ] = None,
    github_summary: Annotated[
        bool,
        typer.Option("--github-summary", help="Also append Markdown to the summary of a GitHub Actions job."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown, for the summary of a CI job.")
    ] = False,
) -> None:
    """Compare two sides, block by block, and say: regression, improvement, equivalent or inconclusive.

    Exit code: 0 improvement or equivalent, 1 regression, 2 wrong usage, 3 inconclusive, 4 not comparable or
    invalid. For example: benchctl compare results/x:baseline results/x:guided
    """
    from benchctl.analysis.compare.compare import CompareOptions
    from benchctl.cli.compare_files import (
        PAGE,
        append,
        checked_outputs,
        summary_path,
        write_comparison,
        write_page,
        write_refusal,
    )
    from benchctl.cli.compare_output import print_comparison
    from benchctl.report.documents.comparison import document_of, refusal_document
    from benchctl.report.text.comparison_markdown import markdown_of

    if as_json and as_markdown:
        raise UsageError("--json and --markdown are two forms of one answer; give one of the two")
    outputs, summary = checked_outputs(output or (), (a, b)), summary_path() if github_summary else None
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
        judge=judge,
        quality_margin_points=quality_margin,
    )
    try:
        comparison = _compared(a, b, options)
    except InvalidDataError as error:
        write_refusal(error, outputs, summary)
        if as_json:
            print(json.dumps(refusal_document(error), indent=1))
        raise
    for path in outputs:
        if path.suffix == PAGE:
            write_page(a, b, options, path)
        else:
            write_comparison(comparison, path, show_all=show_all)
    if summary is not None:
        append(summary, markdown_of(comparison, show_all=show_all))
    if as_json:
        print(json.dumps(document_of(comparison), indent=1, allow_nan=False))
    elif as_markdown:
        print(markdown_of(comparison, show_all=show_all))
    else:
        print_comparison(comparison, show_all=show_all)
    raise typer.Exit(comparison.exit_code)


def _compared(a: str, b: str, options: "CompareOptions") -> "Comparison":
    """Block by block where both sides are result directories; run by run where one is result files."""
    from benchctl.analysis.compare.compare import compare_sides, parse_side
    from benchctl.analysis.compare.unpaired import compare_foreign
    from benchctl.analysis.compare.unpaired_sides import is_unpaired, name_of_side, runs_of_side

    if not is_unpaired(a, b):
        return compare_sides(parse_side(a), parse_side(b), options)
    a_runs, b_runs = (runs_of_side(side, allow_suspect=options.allow_suspect) for side in (a, b))
    names = name_of_side(a), name_of_side(b)
    return compare_foreign(a_runs, b_runs, options, names if names[0] != names[1] else (a, b))


def _estimator(name: str | None) -> "Estimator | None":
    from benchctl.analysis.statistics.block_ratio import ESTIMATORS

    if name is None:
        return None
    for known in ESTIMATORS:
        if name == known:
            return known
    raise UsageError(f"no estimator is called {name!r}; there are {' and '.join(ESTIMATORS)}")


def _noise(given: str | None) -> "Mapping[str, MetricNoise] | None":
    if given is None:
        return None
    if given == "none":
        return {}
    from benchctl.analysis.experiment.experiment import load_experiment
    from benchctl.analysis.planning.noise_floor import noise_of_experiment

    return noise_of_experiment(load_experiment(Path(given))).metrics


def parse_threshold(text: str, option: str = "--threshold") -> float:
    """``1%`` or ``0.01`` to a fraction; ``option`` is what the text was given to."""
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"{option} is {text!r}; write a percentage or a fraction: 1% or 0.01") from None
