"""The texts beside the tables of an experiment: knees, backfill, findings, where the time went, and notes."""

from collections.abc import Iterable, Iterator
from math import ceil

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.bonus import context_in_words, verdict_sentences
from benchctl.analysis.compare.words import warning_kind
from benchctl.profile.planning import several_loads_hint
from benchctl.records.loads import server_id
from benchctl.report.curve_tables import knee_lines
from benchctl.report.experiment_tables import footnotes
from benchctl.units import SECONDS_PER_MINUTE, first_of, s_from_ns


def texts_of(analysis: AnalyzedExperiment) -> list[tuple[str, str, list[str]]]:
    """The name, the title and the lines of each text, the notes last; a text without lines says nothing."""
    texts = [
        ("knees", "Knee of each curve: the load with the most throughput / latency", knee_lines(analysis)),
        *(("backfill", *each) for each in _bonus_notes(analysis)),
        ("findings", "What follows", [f"{each.sentence} [{each.code}]" for each in analysis.findings]),
        ("durations", "Where the time went", time_lines(analysis)),
    ]
    bulleted = [(name, title, [f"* {line}" for line in lines]) for name, title, lines in texts]
    return [*bulleted, ("notes", "Notes", _footnote_lines(analysis))]


def _bonus_notes(analysis: AnalyzedExperiment) -> Iterator[tuple[str, list[str]]]:
    """The verdict of each context as a title and its sentences; nothing where no ways of backfill are compared."""
    if analysis.bonus is None:
        return
    for verdict in analysis.bonus.verdicts:
        yield f"Backfill of bonus tokens, {context_in_words(verdict)}", verdict_sentences(verdict)
    if analysis.bonus.missing:
        yield "Backfill of bonus tokens, missing", list(analysis.bonus.missing)


def time_lines(analysis: AnalyzedExperiment) -> list[str]:
    """The time of the runs by its parts, and the load that would be worth it; none where starts took
    less than half of it, or less than a minute.
    """
    records, profile = [run.record for run in analysis.runs], analysis.profile
    of_servers = {server_id(record): record.times for record in records}.values()
    total_s = _lasting_s((each.launch_ns, each.stop_ns) for each in of_servers)
    start_s = _lasting_s((each.launch_ns, each.ready_ns) for each in of_servers)
    load_s = _lasting_s((each.times.first_send_ns, each.times.last_token_ns) for each in records)
    if profile is None or not load_s or start_s < max(SECONDS_PER_MINUTE, total_s / 2):
        return []
    number = profile.workload.num_prompts
    longer, rest_s = ceil(number * start_s / load_s), total_s - start_s - load_s
    return [
        f"{total_s:.0f} s: {start_s:.0f} s starting servers, {load_s:.0f} s under load, {rest_s:.0f} s the rest",
        f"a longer load costs little: workload.num_prompts={longer} (now {number}) takes as long as the starts"
        + several_loads_hint(profile),
    ]


def _lasting_s(spans: Iterable[tuple[int | None, int | None]]) -> float:
    """Seconds of all spans whose ends are both known."""
    return sum(s_from_ns(end - begin) for begin, end in spans if begin is not None and end is not None)


def _footnote_lines(analysis: AnalyzedExperiment) -> list[str]:
    """``[1] code: message (which runs)``."""
    lines = []
    for number, note in enumerate(footnotes(analysis), start=1):
        run_ids = [
            run.record.run_id for run in analysis.runs if warning_kind(note) in map(warning_kind, run.warnings)
        ]
        runs = first_of(run_ids, 3)
        lines.append(f"[{number}] {note.code}: {note.message}" + (f" ({runs})" if runs else ""))
    return lines
