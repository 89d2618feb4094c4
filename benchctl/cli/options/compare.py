"""Options of ``benchctl compare``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from benchctl.cli.options.options import complete_results

SideA = Annotated[
    str,
    typer.Argument(
        metavar="A",
        help="The reference: DIR, or DIR:variant; or result files of vLLM, "
        "SGLang, AIPerf or GuideLLM: FILE, FILE,FILE, or a DIR of such files. Alone, DIR compares every variant "
        "with its baseline.",
        autocompletion=complete_results,
    ),
]
SideB = Annotated[
    str | None,
    typer.Argument(
        metavar="[B]",
        help="The side to judge, given in the same way; without it, every variant of A against its baseline.",
        autocompletion=complete_results,
    ),
]
Threshold = Annotated[
    str,
    typer.Option(
        "--threshold",
        help="Smallest change that counts: 1% or 0.01. Larger noise on file for this machine raises it for "
        "changes, not for equivalence.",
    ),
]
EquivalenceMargin = Annotated[
    str | None,
    typer.Option(
        "--equivalence-margin",
        metavar="TEXT",
        help="Margin for equivalence, if it differs from the threshold: 2% or 0.02.",
    ),
]
EstimatorName = Annotated[
    Literal["robust", "mean"] | None,
    typer.Option(
        "--estimator",
        metavar="NAME",
        help="How to average blocks: robust or mean; by default as in the profile. Choose before you see results.",
    ),
]
Confidence = Annotated[float, typer.Option("--confidence", help="Confidence level of the intervals.")]
Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        help="Deciding metrics, separated by commas; by default those of the profile that both sides record.",
    ),
]
AllowDifference = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-difference",
        metavar="PATTERN",
        help="A setting in which the sides may differ, beside what variants set and the profile allows, such as "
        "server.*; repeat as needed.",
    ),
]
NoiseFloor = Annotated[
    str | None,
    typer.Option(
        "--noise-floor",
        metavar="DIR|none",
        help="Result of an A/A experiment whose noise a change must exceed, instead of the noise on file; none: "
        "only --threshold counts.",
    ),
]
AllowFailed = Annotated[
    bool, typer.Option("--allow-failed", help="Judge the completed requests even if others failed.")
]
AllowSuspect = Annotated[
    bool, typer.Option("--allow-suspect", help="Include suspect runs; their warnings are printed with the verdict.")
]
AllowAltered = Annotated[
    bool, typer.Option("--allow-altered", help="Compare files even if they were altered after the measurement.")
]
JudgeName = Annotated[
    str | None,
    typer.Option(
        "--judge",
        metavar="NAME",
        help="How to check answers: against gold answers with numeric or math-verify, or by being JSON with json.",
        show_default="numeric; json where requests ask for JSON without gold answers",
    ),
]
QualityMargin = Annotated[
    float | None,
    typer.Option(
        "--quality-margin",
        metavar="POINTS",
        help="Acceptable loss of accuracy in percentage points; quality then counts for the verdict.",
    ),
]
StepTimeModel = Annotated[
    Path | None,
    typer.Option(
        "--step-time-model",
        metavar="FILE",
        help="Model of 'benchctl steptime fit' that explains the change of the mean step; by default that of the "
        "profile.",
    ),
]
ShowAll = Annotated[bool, typer.Option("--all", help="Show all exploratory metrics.")]
Output = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write the comparison to a file: .json, .md, .csv, .html for the whole page, or .png, "
        ".svg or .pdf for a picture of ratios and intervals; repeat as needed.",
    ),
]
GithubSummary = Annotated[
    bool, typer.Option("--github-summary", help="Also append Markdown to the summary of a GitHub Actions job.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]
