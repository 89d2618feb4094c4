"""The outcome of an experiment on the terminal: tables, counts of runs, reasons of suspect runs, stored noise."""

import shlex
import sys
from collections import Counter
from typing import TYPE_CHECKING

from benchctl.untrusted.text import visible_lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchctl.analysis.analyzed import AnalyzedExperiment
    from benchctl.analysis.summary.runs import RunSummary
    from benchctl.measure.experiment import Outcome
    from benchctl.profile.model import Profile
    from benchctl.report.page.verdict import PageVerdict


def print_outcome(path: "Path", outcome: "Outcome") -> "tuple[AnalyzedExperiment, PageVerdict]":
    """Print what an experiment came to and its verdicts, and warn of suspect runs; returns what was printed."""
    from benchctl.cli.output.verdicts import print_verdicts

    analysis, verdict = _print_results(path)
    counts = {
        "done": outcome.num_done,
        "suspect": outcome.num_suspect,
        "failed": outcome.num_failed,
        "done before": outcome.num_skipped,
    }
    print("runs: " + ", ".join(f"{count} {state}" for state, count in counts.items() if count))
    print(f"tables: {path / 'summary.csv'}, {path / 'sweep_summary.csv'}")
    print(f"details: benchctl show {shlex.quote(str(path))}")
    if outcome.num_failed:
        warn(f"{outcome.num_failed} runs failed; repeat them with: benchctl run --resume {shlex.quote(str(path))}")
    for line in suspects_lines(analysis):
        warn(line)
    print_verdicts(analysis, verdict)
    return analysis, verdict


def print_tables(analysis: "AnalyzedExperiment") -> None:
    """Print cells, their comparison with the baseline, findings and notes."""
    from benchctl.cli.output.screen import print_notes, wide_console
    from benchctl.report.text.floor_table import floor_table
    from benchctl.report.text.ladder_table import ladder_table
    from benchctl.report.text.node_table import nodes_table
    from benchctl.report.text.passes_table import launch_table, passes_table
    from benchctl.report.text.tables import cells_table, sweep_table

    console = wide_console()
    tables = (cells_table, sweep_table, floor_table, nodes_table, ladder_table, passes_table, launch_table)
    for table in (draw(analysis) for draw in tables):
        if table is not None:
            console.print()
            console.print(table)
    print_notes(console, analysis)


def _print_results(path: "Path") -> "tuple[AnalyzedExperiment, PageVerdict]":
    from benchctl.analysis.analyzed import analyze_directory
    from benchctl.report.export import write_derived

    analysis = analyze_directory(path)
    files = write_derived(analysis)
    print_tables(analysis)
    print()
    for reason in files.skipped:
        print(f"not drawn: {reason}")
    for picture in files.written:
        if picture.suffix == ".png":
            print(f"picture: {picture}")
    return analysis, files.verdict


def store_noise(path: "Path", profile: "Profile") -> None:
    """Store the noise of an A/A experiment and print the result; no effect for other experiments."""
    from benchctl.measure.noise_on_file import keep_noise

    stored = keep_noise(path, profile)
    if stored is not None and stored.path is not None:
        print(f"noise of this machine stored: benchctl noise show {stored.path.parent.name}")
    elif stored is not None:
        warn(f"the noise was not stored: {stored.reason}")


def suspects_lines(analysis: "AnalyzedExperiment") -> list[str]:
    """One sentence for suspect runs whose client times are excluded, one for those that are excluded entirely."""
    suspect = [run for run in analysis.runs if run.record.state == "suspect"]
    in_part = [run for run in suspect if run.usability.client_excluded is not None]
    others = [run for run in suspect if run.usability.client_excluded is None]
    lines = []
    if in_part:
        lines.append(
            f"{_runs(in_part)}: times of the client are excluded, times of the server (step_ms) are not; "
            "see Notes. --allow-suspect of compare, report and show includes all"
        )
    if others:
        lines.append(f"{_runs(others)}: their results are not reliable; see Notes")
    return lines


def _runs(suspect: "Sequence[RunSummary]") -> str:
    from benchctl.analysis.validity.usability import decisive_warnings

    codes = Counter(code for run in suspect for code in {w.code for w in decisive_warnings(run.record)})
    why = ", ".join(f"{code} in {count}" for code, count in codes.most_common()) or "no reason recorded"
    number = "1 run is" if len(suspect) == 1 else f"{len(suspect)} runs are"
    return f"{number} suspect ({why})"


def warn(message: str) -> None:
    print(f"warning: {visible_lines(message)}", file=sys.stderr)
