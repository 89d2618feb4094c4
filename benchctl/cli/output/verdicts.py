"""The verdicts at the end of ``benchctl run``, as lines and as JSON, and the commands that follow.

The outcome of an experiment on the terminal: tables, counts of runs, reasons of suspect runs, stored noise.
An experiment before its first run: durations, batch, saturation, and the origin of the step times.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.text import Text

from benchctl.analysis.compare.compare import blocks_to_settle
from benchctl.analysis.compare.words import cell_sentence, looks_lines
from benchctl.analysis.planning import is_repeated_baseline
from benchctl.analysis.quality.accuracy import accuracy_sentence
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS
from benchctl.analysis.summary.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.summary.summary import RunSummary
from benchctl.analysis.validity.usable import decisive_warnings
from benchctl.cli import screen
from benchctl.cli.screen import TextConsole, verdict_text, warn, wide_console
from benchctl.formats import count_of, duration, four_digits, percentage
from benchctl.measure.durations import AROUND_S, earlier_overhead_s, estimate_durations
from benchctl.measure.experiment import Outcome
from benchctl.measure.noise_on_file import keep_noise
from benchctl.measure.resume.extension import why_not_extended
from benchctl.measure.telemetry.gpu import gpu_inventory
from benchctl.profile.model import Profile
from benchctl.profile.planning import plan_runs
from benchctl.records.directory import arm_label
from benchctl.records.record import PreparedRequest
from benchctl.report.documents import metric_document, quality_document
from benchctl.report.export import PAGE_NAME, ReportFiles, write_derived, write_pictures
from benchctl.report.page.verdict import ComparisonVerdict, PageVerdict
from benchctl.report.tables import experiment, times
from benchctl.report.tables.experiment import bonus_notes, footnote_lines
from benchctl.sim.prediction.plan_prediction import PlanPrediction, predict_plan
from benchctl.sim.prediction.prediction import PredictedRun
from benchctl.untrusted.text import visible_line


def next_commands(analysis: AnalyzedExperiment, verdict: PageVerdict) -> dict[str, str | None]:
    """The commands to type next, with every path quoted for a shell; None for one that leads nowhere.

    ``more_blocks`` is None where nothing is inconclusive, or where more blocks do not help or cannot be added.
    """
    path, planned = analysis.results.path, analysis.results.manifest.blocks
    likely = blocks_to_settle(verdict.comparisons) if _can_grow(analysis) else None
    is_screening = all(comparison.is_screening for comparison in verdict.comparisons)
    num_blocks = MIN_PAIRED_BLOCKS if is_screening and likely is not None else likely
    more = ["benchctl", "run", "--resume", str(path), "--blocks", str(num_blocks)]
    return {
        "compare": shlex.join(["benchctl", "compare", str(path)]) if _has_verdicts(analysis, verdict) else None,
        "more_blocks": shlex.join(more) if num_blocks is not None and num_blocks > planned else None,
        "reason": _why_more(likely, is_screening=is_screening),
    }


def _why_more(likely: int | None, *, is_screening: bool) -> str:
    """The reason for more blocks; ``likely`` is the number that would settle every arm."""
    if not is_screening:
        return f"inconclusive; about {likely} blocks would settle it if scatter and changes stay as they are"
    least = f"screening; a verdict takes at least {MIN_PAIRED_BLOCKS} blocks"
    if likely is None or likely <= MIN_PAIRED_BLOCKS:
        return least
    return f"{least}, and about {likely} if scatter and changes stay as they are"


def print_verdicts(analysis: AnalyzedExperiment, verdict: PageVerdict) -> None:
    """Print one line for each arm against the baseline, then the page and the commands to go on with."""
    if _has_verdicts(analysis, verdict):
        console = wide_console()
        lines = [line for one in verdict.all for line in _verdict_lines(one)]
        width = max(len(visible_line(name)) for name, _ in lines)
        print(f"\nVerdicts against {analysis.results.manifest.baseline}")
        for name, sentence in lines:
            console.print(Text(f"{visible_line(name):<{width}}  ").append_text(verdict_text(sentence)))
        for line in dict.fromkeys(line for each in verdict.comparisons for line in looks_lines(each)):
            print(line)
    commands = next_commands(analysis, verdict)
    print(f"page: {shlex.quote(str(analysis.results.path / PAGE_NAME))}")
    if commands["compare"] is not None:
        print(f"compare: {commands['compare']}")
    if commands["more_blocks"] is not None:
        print(f"{commands['reason']}: {commands['more_blocks']}")


def outcome_document(
    analysis: AnalyzedExperiment, outcome: Outcome, verdict: PageVerdict, exit_code: int
) -> dict[str, Any]:
    """The output of ``benchctl run --json``; ``verdict`` and the sentences are those of ``compare``."""
    commands = next_commands(analysis, verdict)
    warnings = [*analysis.warnings, *(warning for run in analysis.runs for warning in run.warnings)]
    return {
        "directory": str(analysis.results.path),
        "page": str(analysis.results.path / "report.html"),
        "exit_code": exit_code,
        "state": analysis.results.manifest.state,
        "runs": {
            "done": outcome.num_done,
            "suspect": outcome.num_suspect,
            "failed": outcome.num_failed,
            "done_before": outcome.num_skipped,
        },
        "baseline": analysis.results.manifest.baseline,
        "verdict": verdict.word,
        "verdict_exit_code": verdict.exit_code,
        "summary": verdict.sentence,
        "verdicts": [document for one in verdict.all for document in _verdict_documents(one)],
        "commands": {name: commands[name] for name in ("compare", "more_blocks")},
        "warnings": msgspec.to_builtins(warnings),
        "damage": list(analysis.damage),
    }


def _has_verdicts(analysis: AnalyzedExperiment, verdict: PageVerdict) -> bool:
    """True where another arm than the baseline was planned and some run counts."""
    return bool(verdict.all) and any(run.is_usable for run in analysis.runs)


def _can_grow(analysis: AnalyzedExperiment) -> bool:
    """True where blocks can be added; an A/A experiment measures noise and has nothing to settle."""
    if analysis.profile is not None and is_repeated_baseline(analysis.profile):
        return False
    return why_not_extended(analysis.results.manifest) is None


def _verdict_lines(one: ComparisonVerdict) -> Iterator[tuple[str, str]]:

    control = " (control)" if one.is_control else ""
    if one.comparison is None:
        yield f"{one.b_name}{control}", f"{one.word}: {one.sentence}"
        return
    for cell in one.comparison.cells:
        yield f"{cell.b_label}{control}", cell_sentence(cell)
        if cell.quality is not None:
            yield "", accuracy_sentence(cell.quality)


_OF_A_CHANGE: Final = ("verdict", "ratio", "ci_low", "ci_high", "margin_frac", "reason")


def _verdict_documents(one: ComparisonVerdict) -> Iterator[dict[str, Any]]:

    if one.comparison is None:
        yield {"arm": one.b_name, "verdict": one.word, "is_control": one.is_control, "sentence": one.sentence}
        return
    for cell in one.comparison.cells:
        documents = [metric_document(cell, metric) for metric in cell.deciding]
        yield {
            "arm": cell.b_label,
            "verdict": cell.verdict,
            "is_control": one.is_control,
            "sentence": cell_sentence(cell),
            "changes": [
                {"metric": document["name"]} | {name: document[name] for name in _OF_A_CHANGE}
                for document in documents
            ],
            "quality": quality_document(cell),
        }


def print_outcome(path: Path, outcome: Outcome) -> tuple[AnalyzedExperiment, PageVerdict]:
    """Print what an experiment came to and its verdicts, and warn of suspect runs; returns what was printed."""
    analysis, files = _print_results(path)
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
    print_verdicts(analysis, files.verdict)
    draw(analysis, files)
    return analysis, files.verdict


def draw(analysis: AnalyzedExperiment, files: ReportFiles) -> None:
    """Write the pictures of a report and print where they are."""
    with_pictures = write_pictures(analysis, files)
    for reason in with_pictures.skipped:
        print(f"not drawn: {reason}")
    for path in with_pictures.written[len(files.written) :]:
        print(f"picture: {path}")


def print_tables(analysis: AnalyzedExperiment) -> None:
    """Print cells, their comparison with the baseline, findings and notes."""
    console = screen.wide_console()
    tables = (
        experiment.cells_table(analysis),
        experiment.sweep_table(analysis),
        experiment.floor_table(analysis),
        experiment.nodes_table(analysis.nodes),
        experiment.ladder_table(analysis),
        times.passes_table(analysis),
        times.launch_table(analysis),
    )
    screen.print_tables(console, tables)
    print_notes(console, analysis)


def _print_results(path: Path) -> tuple[AnalyzedExperiment, ReportFiles]:
    analysis = analyze_directory(path)
    files = write_derived(analysis)
    print_tables(analysis)
    print()
    return analysis, files


def store_noise(path: Path, profile: Profile) -> None:
    """Store the noise of an A/A experiment and print the result; no effect for other experiments."""
    stored = keep_noise(path, profile)
    if stored is not None and stored.path is not None:
        print(f"noise of this machine stored: benchctl noise show {stored.path.parent.name}")
    elif stored is not None:
        warn(f"the noise was not stored: {stored.reason}")


def suspects_lines(analysis: AnalyzedExperiment) -> list[str]:
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


def _runs(suspect: Sequence[RunSummary]) -> str:

    codes = Counter(code for run in suspect for code in {w.code for w in decisive_warnings(run.record)})
    why = ", ".join(f"{code} in {count}" for code, count in codes.most_common()) or "no reason recorded"
    number = "1 run is" if len(suspect) == 1 else f"{len(suspect)} runs are"
    return f"{number} suspect ({why})"


_WORDS_FROM_S: Final = 100
_TIMES_FROM: Final = 10
_CROWDED_FRAC: Final = 0.95
_WAITING_FROM: Final = 1.05
"""Requests for each row of the batch from which some wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """Seconds of one run of each arm by its label, as far as they are known, and what they rest on.

    ``has_starts`` is False where they are those of the load alone, because no server was started here before.
    """

    run_s: Mapping[str, float]
    around_s: float
    basis: str
    has_starts: bool = True
    prediction: PlanPrediction | None = None


def estimate_plan(
    profile: Profile,
    requests: Sequence[PreparedRequest],
    model: Path | None = None,
    *,
    visible: str | None = None,
) -> PlanEstimate:
    """Durations by the step-time model that is named, else from earlier runs here, else by the roofline.

    ``visible`` names the devices of the servers, where CUDA_VISIBLE_DEVICES is another one for them. Raises
    UsageError for a step-time model that is damaged or of another hardware.
    """
    gpus = [gpu.name for gpu in gpu_inventory(visible)]
    predicted = predict_plan(profile, requests, gpus, model)
    prediction = None if isinstance(predicted, str) else predicted
    is_named = model is not None or profile.step_time_model is not None
    earlier = None if is_named or profile.engine.kind == "sim" else estimate_durations(profile, requests, gpus)
    if earlier is not None:
        basis = f"from {count_of(earlier.num_runs, 'earlier run')} on this machine"
        return PlanEstimate(run_s=earlier.run_s, around_s=earlier.around_s, basis=basis, prediction=prediction)
    if isinstance(predicted, str):
        return PlanEstimate(run_s={}, around_s=0.0, basis=predicted)
    overhead_s = predicted.overhead_s
    if overhead_s is None:
        overhead_s = earlier_overhead_s(profile, gpus)
    run_s = {label: run.load_s + (overhead_s or 0.0) for label, run in predicted.runs.items()}
    return PlanEstimate(
        run_s=run_s,
        around_s=0.0 if profile.engine.kind == "sim" else AROUND_S,
        basis=predicted.basis,
        has_starts=overhead_s is not None,
        prediction=prediction,
    )


def duration_text(profile: Profile, estimate: PlanEstimate) -> str:
    """``estimated duration 240 s (4 min)``, with what it leaves out; or that it is unknown."""
    if not estimate.run_s:
        return (
            f"duration unknown: no earlier run of {profile.engine.kind} with {profile.model} on this machine; the "
            "first block will show it"
        )
    runs = plan_runs(profile).runs
    total_s = sum(estimate.run_s[arm_label(run.variant, run.cell)] for run in runs) + estimate.around_s
    at_most = " at most" if profile.stopping is not None else ""
    in_words = f" ({duration(total_s)})" if total_s >= _WORDS_FROM_S else ""
    what = "duration" if estimate.has_starts else "duration of the loads"
    rest = "" if estimate.has_starts else f"; {count_of(len(runs), 'server start')} come on top, unmeasured here"
    earlier = f", {estimate.basis}" if estimate.prediction is None or estimate.basis.startswith("from ") else ""
    return f"estimated {what} {total_s:.0f} s{in_words}{at_most}{earlier}{rest}"


def print_prediction(estimate: PlanEstimate) -> None:
    """Print the origin of the step times, and the load that they predict."""
    if estimate.prediction is None:
        if not estimate.run_s:
            print(estimate.basis)
        return
    print(estimate.prediction.basis)
    for line in load_lines(estimate.prediction.runs):
        print(line)
    for warning in estimate.prediction.warnings:
        warn(warning.message)


def load_lines(runs: Mapping[str, PredictedRun]) -> Iterator[str]:
    """One line for each load that arms share, with the arms that it holds for."""
    labels: dict[str, list[str]] = {}
    for label, run in runs.items():
        labels.setdefault(load_text(run), []).append(label)
    for text, arms in labels.items():
        yield f"{', '.join(arms)}: {text}" if len(labels) > 1 else f"load: {text}"


def load_text(run: PredictedRun) -> str:
    """The batch, its latencies and its memory; at a rate, how much of the server's capacity is offered."""
    parts = [
        f"{four_digits(run.batch)} rows in a batch on average, {run.largest_batch} at most",
        f"step {four_digits(run.step_s * 1e3)} ms",
        f"first token after {four_digits(run.ttft_s * 1e3)} ms",
    ]
    if run.in_server > _WAITING_FROM * run.batch:
        parts.insert(1, f"{four_digits(run.in_server)} sequences in the server, so that some wait for a row")
    if run.kv_frac is not None:
        crowded = ": it is full" if run.kv_frac > _CROWDED_FRAC else ""
        parts.append(f"key-value memory {percentage(run.kv_frac, 2)} used at most{crowded}")
    if run.num_preempted:
        parts.append(f"{count_of(run.num_preempted, 'preemption')}")
    if run.offered is not None and run.offered_rate is not None:
        parts.insert(0, _saturation_text(run))
    return "; ".join(parts)


def _saturation_text(run: PredictedRun) -> str:
    offered, rate = run.offered, run.offered_rate
    if offered is None or rate is None:
        return ""
    part = offered.utilisation
    times = f"{percentage(part)} of" if part < _TIMES_FROM else f"{part:.0f} times"
    most = f"the {four_digits(offered.max_requests_per_s)} that the server completes at most"
    share = f"{four_digits(rate)} requests/s offered, {times} {most}"
    if offered.is_saturated:
        return f"saturated: {share}, so the queue grows while the load lasts"
    return f"{share}, {four_digits(offered.concurrency)} in the server on average"


def print_notes(console: TextConsole, analysis: AnalyzedExperiment) -> None:
    """Print the verdicts on backfill, the findings and the notes of a result directory, each under its title."""
    backfill = [(title, [f"* {sentence}" for sentence in sentences]) for title, sentences in bonus_notes(analysis)]
    findings = [f"* {finding.sentence} [{finding.code}]" for finding in analysis.findings]
    for title, lines in (*backfill, ("What follows", findings), ("Notes", footnote_lines(analysis))):
        if lines:
            console.print()
            console.print(title, style="bold")
            for line in lines:
                console.print(visible_line(line))
