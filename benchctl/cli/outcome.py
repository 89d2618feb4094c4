"""The end of an experiment on the terminal and as JSON: tables, verdicts, suspect runs, and the next commands."""

import shlex
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.compare.accuracy import accuracy_sentence
from benchctl.analysis.compare.answer import answer_lines, cell_sentence
from benchctl.analysis.compare.result import CellComparison, blocks_to_settle
from benchctl.analysis.compare.words import looks_lines
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS
from benchctl.analysis.validity.usable import decisive_warnings
from benchctl.cli.screen import say_verdict, text_console, verdict_text, warn
from benchctl.measure.directory import why_not_extended
from benchctl.measure.experiment import Outcome
from benchctl.measure.on_file import keep_noise
from benchctl.profile.model import Profile
from benchctl.profile.planning import is_repeated_baseline
from benchctl.report import curve_tables, experiment_tables, time_tables
from benchctl.report.documents import metric_document, quality_document
from benchctl.report.export import PAGE_NAME, drawing, write_derived, write_pictures
from benchctl.report.table import Column, Table
from benchctl.report.texts import texts_of
from benchctl.report.verdicts import ComparisonVerdict, PageVerdict
from benchctl.units import count_of
from benchctl.untrusted.text import visible_line


def print_outcome(path: Path, outcome: Outcome) -> tuple[AnalyzedExperiment, PageVerdict]:
    """Print what an experiment came to and its verdicts, and warn of suspect runs; returns what was printed."""
    with drawing() as draw:
        analysis = analyze_directory(path)
        files = write_derived(analysis, draw)
        if outcome.num_failed:
            _warn_of_failures(analysis, outcome.num_failed)
        print_tables_and_notes(analysis, is_short=_has_verdicts(analysis, files.verdict))
        print(f"\nruns: {counts_text(outcome)}")
        for line in suspects_lines(analysis):
            warn(line)
        drawn = write_pictures(analysis, files)
    if drawn.no_pictures is not None:
        print(f"not drawn: {drawn.no_pictures}")
    elif len(drawn.written) > len(files.written):
        print(f"pictures: {path / 'plots'}")
    print(f"tables: {path / 'summary.csv'}, sweep_summary.csv")
    print(f"page: {path / PAGE_NAME}")
    print(f"details: benchctl show {shlex.quote(str(path))}")
    print_verdicts(analysis, files.verdict)
    return analysis, files.verdict


def _warn_of_failures(analysis: AnalyzedExperiment, num_failed: int) -> None:
    """Say how many runs failed, why the first did, and how to measure them and those that were not tried."""
    failures = (run.record.failure for run in analysis.runs if run.record.failure is not None)
    first = next(failures, None)  # None where all were cut off before they could note it
    reason = "" if first is None else f": {visible_line(first.reason)}"
    num_left = len(analysis.runs_not_begun)
    left = f", and {count_of(num_left, 'run')} of other blocks were not tried" if num_left else ""
    resume = shlex.join(["benchctl", "run", "--resume", str(analysis.results.path)])
    warn(f"{count_of(num_failed, 'run')} failed{left}{reason}")
    warn(f"measure what is left with: {resume}")


def outcome_document(
    analysis: AnalyzedExperiment, outcome: Outcome, verdict: PageVerdict, exit_code: int
) -> dict[str, Any]:
    """The output of ``benchctl run --json``; ``verdict`` and the sentences are those of ``compare``."""
    commands = _next_commands(analysis, verdict)
    warnings = [*analysis.warnings, *(warning for run in analysis.runs for warning in run.warnings)]
    return {
        "directory": str(analysis.results.path),
        "page": str(analysis.results.path / PAGE_NAME),
        "exit_code": exit_code,
        "state": analysis.results.manifest.state,
        "runs": _counts(outcome),
        "baseline": analysis.results.manifest.baseline,
        "verdict": verdict.word,
        "verdict_exit_code": verdict.exit_code,
        "summary": verdict.sentence,
        "verdicts": [
            _verdict_document(one, cell)
            for one in verdict.all
            for cell in (one.comparison.cells if one.comparison is not None else (None,))
        ],
        "commands": {name: commands[name] for name in ("compare", "more_blocks")},
        **({} if verdict.precision is None else {"precision": verdict.precision}),
        "warnings": msgspec.to_builtins(warnings),
        "damage": list(analysis.damage),
    }


def counts_text(outcome: Outcome) -> str:
    """The numbers of runs by their end: ``3 done, 1 failed``."""
    return ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in _counts(outcome).items() if count)


def _counts(outcome: Outcome) -> dict[str, int]:
    return {
        "done": outcome.num_done,
        "suspect": outcome.num_suspect,
        "failed": outcome.num_failed,
        "done_before": outcome.num_skipped,
    }


_OF_A_CHANGE: Final = ("verdict", "ratio", "ci_low", "ci_high", "margin_frac", "reason")


def _verdict_document(one: ComparisonVerdict, cell: CellComparison | None) -> dict[str, Any]:
    """A cell of a comparison; None stands for a comparison that could not be made."""
    if cell is None:
        return {"arm": one.b_name, "verdict": one.word, "is_control": one.is_control, "sentence": one.sentence}
    changes = [metric_document(cell, metric) for metric in cell.deciding]
    return {
        "arm": cell.b_label,
        "verdict": cell.verdict,
        "is_control": one.is_control,
        "sentence": cell_sentence(cell, one.comparison.num_looks if one.comparison is not None else 1),
        "changes": [{"metric": each["name"]} | {name: each[name] for name in _OF_A_CHANGE} for each in changes],
        "quality": quality_document(cell),
    }


def print_verdicts(analysis: AnalyzedExperiment, verdict: PageVerdict) -> None:
    """Print the next commands, each arm against the baseline with its cause and trust, and the whole verdict."""
    commands, console = _next_commands(analysis, verdict), text_console()
    for label, command in (("compare", commands["compare"]), ("more blocks", commands["more_blocks"])):
        if command is not None:
            print(f"{label}: {command}")
    if _has_verdicts(analysis, verdict):
        print(f"\nVerdicts against {analysis.results.manifest.baseline}")
    for one in verdict.all if _has_verdicts(analysis, verdict) else ():
        if one.comparison is None:
            say_verdict(f"{one.word}: {one.sentence}")
            continue
        rows, control = [], " (control)" if one.is_control else ""
        for cell in one.comparison.cells:
            sentence = cell_sentence(cell, one.comparison.num_looks)
            rows.append({"arm": f"{cell.b_label}{control}", "verdict": sentence})
            rows += [] if cell.quality is None else [{"verdict": accuracy_sentence(cell.quality)}]
        columns = Column("arm", "", is_left=True), Column("verdict", "", is_left=True)
        console.print(Table("", columns, tuple(rows)).drawn(console.width, verdict_text))
        for line in (*answer_lines(one.comparison), *looks_lines(one.comparison)):
            console.print(f"  {line}")
    if verdict.precision is not None:
        print(f"precision: {verdict.precision}")
    if verdict.all:
        say_verdict(f"{verdict.word}: {verdict.sentence}", "bold")


def _has_verdicts(analysis: AnalyzedExperiment, verdict: PageVerdict) -> bool:
    """True where another arm than the baseline was planned and some run counts."""
    return bool(verdict.all) and any(run.is_usable for run in analysis.runs)


def _next_commands(analysis: AnalyzedExperiment, verdict: PageVerdict) -> dict[str, str | None]:
    """The commands to type next, with every path quoted for a shell; None for one that leads nowhere.

    ``more_blocks`` is None where nothing is inconclusive, or where more blocks do not help or cannot be added: an
    A/A experiment measures noise and has nothing to settle.
    """
    path, manifest, profile = str(analysis.results.path), analysis.results.manifest, analysis.profile
    can_grow = why_not_extended(manifest) is None and (profile is None or not is_repeated_baseline(profile))
    needed = blocks_to_settle(verdict.comparisons) if can_grow else None
    if needed is not None and all(comparison.is_screening for comparison in verdict.comparisons):
        needed = MIN_PAIRED_BLOCKS
    more = shlex.join(["benchctl", "run", "--resume", path, "--blocks", str(needed)])
    return {
        "compare": shlex.join(["benchctl", "compare", path]) if _has_verdicts(analysis, verdict) else None,
        "more_blocks": more if needed is not None and needed > manifest.blocks else None,
    }


_IN_PART: Final = (
    "times of the client are excluded, times of the server (step_ms) are not; see Notes. --allow-suspect of "
    "compare, report and show includes all"
)


def suspects_lines(analysis: AnalyzedExperiment) -> list[str]:
    """One sentence for suspect runs whose client times are excluded, one for those that are excluded entirely."""
    lines = []
    for is_in_part, meaning in ((True, _IN_PART), (False, "their results are not reliable; see Notes")):
        runs = [
            run
            for run in analysis.runs
            if run.record.state == "suspect" and (run.usability.client_excluded is not None) is is_in_part
        ]
        codes = Counter(code for run in runs for code in {w.code for w in decisive_warnings(run.record)})
        why = ", ".join(f"{code} in {count}" for code, count in codes.most_common()) or "no reason recorded"
        if runs:
            number = "1 run is" if len(runs) == 1 else f"{len(runs)} runs are"
            lines.append(f"{number} suspect ({why}): {meaning}")
    return lines


def print_tables_and_notes(analysis: AnalyzedExperiment, *, is_short: bool = False) -> None:
    """Print cells, their comparison with the baseline, findings and notes.

    ``is_short``: verdicts follow, which say all of a single cell beside its baseline.
    """
    console = text_console()
    tables = (
        None if is_short else experiment_tables.cells_table(analysis),
        time_tables.passes_table(analysis),
        time_tables.launch_table(analysis),
        None if is_short and len(analysis.cells) < 3 else experiment_tables.sweep_table(analysis),
        curve_tables.curves_table(analysis),
        experiment_tables.nodes_table(analysis.nodes),
        experiment_tables.ladder_table(analysis),
        curve_tables.capacity_table(analysis),
    )
    for table in tables:
        if table is not None:
            console.print()
            console.print(table)
    for line in curve_tables.capacity_lines(analysis):
        console.print(visible_line(line))
    for _, title, lines in texts_of(analysis):
        if lines:
            console.print()
            console.print(title, style="bold")
            for line in lines:
                console.print(visible_line(line))


def store_noise(path: Path, profile: Profile) -> None:
    """Store the noise of an A/A experiment and print the result; no effect for other experiments."""
    stored = keep_noise(path, profile)
    if isinstance(stored, Path):
        print(f"noise of this machine stored: benchctl noise show {stored.parent.name}")
    elif stored is not None:
        warn(f"the noise was not stored: {stored}")
