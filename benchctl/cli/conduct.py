"""An experiment from its profile to its outcome: checked, prepared, and measured or simulated."""

import fcntl
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import typer
from tqdm import tqdm

from benchctl.cli.failures import advising, drawing, exit_code_of, log_line, width_of
from benchctl.cli.options import check_names, refuse
from benchctl.cli.screen import bar, live_line, note, say, warn
from benchctl.engines.engine import engine_for
from benchctl.errors import EngineUnavailableError, UsageError
from benchctl.measure.directory import Origin, done_runs
from benchctl.measure.experiment import (
    MeasureRun,
    Outcome,
    create_experiment,
    create_simulation,
    pending_runs,
    run_experiment,
)
from benchctl.measure.machine import node_name
from benchctl.measure.run import Listener, measure_run
from benchctl.measure.tokens import planning_tokenizer, prepare_counted, tokenizer_for
from benchctl.profile.engine_table import is_virtual, own_variables
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, servers, variant_settings
from benchctl.profile.sizes import capacity_sizes, pilot_profile, with_sizes
from benchctl.records.directory import BLOCKS, RequestSets, ResultDirectory
from benchctl.records.record import LoadsChoice, Look, PlannedRun, RunRecord, StoppingRecord
from benchctl.units import duration, folded, percentage
from benchctl.untrusted.text import visible_line, visible_lines
from benchctl.workload.prepare import LENGTHS_KEY, PreparedSet, lengths_profile, needs_lengths
from benchctl.workload.tokenizers import KEY, Tokenizer

_REPORT_INTERVAL_S: Final = 10.0
_TAIL_LINES: Final = 8
"""Lines shown of the log of a server that failed; the record keeps more."""


def check_experiment(profile: Profile, *, is_plan: bool = False) -> None:
    """Raise UsageError for an experiment that cannot be measured here, before it begins.

    A plan may be made on another machine than the one that measures: a missing engine is then a warning.
    """
    check_names(profile)
    for name in sorted(set(own_variables()).intersection(os.environ)):
        warn(f"{name} is set in this environment and not passed on to servers: benchctl sets it from the profile")
    problems: dict[str, None] = {}  # each once, in the order of the arms
    for variant, cell in arms(profile):
        try:
            engine_for(profile.engine.kind).check_available(variant_settings(profile, variant, cell))
        except EngineUnavailableError as error:
            problems[str(error)] = None
    for problem in problems if is_plan else ():
        refuse(problem, is_plan=True)
    if problems and not is_plan:
        raise EngineUnavailableError("\n".join(problems))


def to_stderr(*, when: bool) -> AbstractContextManager[object]:
    """Print all that follows on stderr: stdout is for one document."""
    return redirect_stdout(sys.stderr) if when else nullcontext()


@contextmanager
def reporting_alone(results: Path) -> Iterator[None]:
    """Wait for another command that writes reports of an experiment that several processes measure."""
    if not ResultDirectory(results).is_divided:
        yield
        return
    handle = os.open(results / BLOCKS, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def prepare_experiment(
    profile: Profile,
    lengths_from: Path | None = None,
    *,
    tokenizer: AbstractContextManager[Tokenizer] | None = None,
) -> PreparedSet:
    """The request set, which the engine can serve; warnings about it are printed.

    ``tokenizer`` counts it; without one, as for a plan, no server is asked.
    """
    with tokenizer or nullcontext(planning_tokenizer(profile)) as counting:
        prepared = prepare_counted(profile, counting, lengths_from)
    sets = prepared.sets
    for variant, cell in arms(profile):
        settings = variant_settings(profile, variant, cell)
        engine_for(profile.engine.kind).check_requests(sets.of(cell), settings)
        if is_virtual(profile.engine.kind):
            from benchctl.sim.virtual import check_simulated

            check_simulated([settings], sets.of(cell))
    for warning in prepared.warnings:
        warn(warning.message)
    return prepared


def announced_tokenizer(profile: Profile, *, on_login_node: bool) -> AbstractContextManager[Tokenizer]:
    """The tokenizer that counts the prompts of an experiment; it says when it starts a server for that.

    A login node starts none: that raises UsageError with what to do instead.
    """

    def tell(text: str) -> None:
        if not on_login_node:
            say(text)
            return
        raise UsageError(
            f"profile {profile.name}: the prompts can be counted only by a server of {profile.model}, and --on "
            f"slurm starts none on the machine that submits; name a tokenizer with {KEY}: a directory with "
            "tokenizer.json, or a repository of the model hub"
        )

    return tokenizer_for(profile, tell)


def measure_lengths(
    profile: Profile,
    origin: Origin,
    *,
    is_quiet: bool,
    simulate: MeasureRun | None = None,
    tokenizer: AbstractContextManager[Tokenizer] | None = None,
) -> Path | None:
    """Measure the natural lengths that ``profile`` needs, in a directory beside that of ``origin``.

    Returns their result directory; None if it needs none.
    """
    if not needs_lengths(profile):
        return None
    pilot, first = lengths_profile(profile), f"natural lengths first: {profile.baseline} once"
    return _measure_first(
        pilot, origin, first, LENGTHS_KEY, is_quiet=is_quiet, simulate=simulate, tokenizer=tokenizer
    )


def measure_sizes(
    profile: Profile,
    origin: Origin,
    *,
    is_quiet: bool,
    simulate: MeasureRun | None = None,
    tokenizer: AbstractContextManager[Tokenizer] | None = None,
) -> Profile:
    """The profile with the sizes of its loads, from a pilot in a directory beside that of ``origin`` where it needs
    one. Its capacities choose the sizes and count in nothing.
    """
    if profile.capacity is None:
        return profile
    if origin.is_elsewhere:
        raise UsageError(
            f"profile {profile.name}: a pilot finds the sizes of its loads, and its blocks are measured elsewhere; "
            "name sizes in sweep, such as those that a run here finds"
        )
    pilot, first = pilot_profile(profile), "sizes of loads first: one server of each arm"
    path = _measure_first(pilot, origin, first, None, is_quiet=is_quiet, simulate=simulate, tokenizer=tokenizer)
    from benchctl.analysis.compare.result import EXIT_CODES
    from benchctl.analysis.experiment.capacity import arm_capacities
    from benchctl.analysis.experiment.experiment import load_experiment

    capacities = arm_capacities(load_experiment(path), (), 0.95)
    levels = {each.arm.label: each.level for each in capacities if each.level is not None}
    if len(levels) < len(capacities):
        for limit in (limit for each in capacities for limit in each.limits):
            warn(f"{limit}; set capacity.smallest or capacity.largest, or measure again; it is in {path}")
        raise typer.Exit(EXIT_CODES["inconclusive"])
    sizes = capacity_sizes(profile, [*levels.values()])
    about = ", ".join(f"{label} about {level:.3g}" for label, level in levels.items())
    say(f"{about}: {len(sizes)} sizes from {sizes[0]:g} to {sizes[-1]:g}")
    return with_sizes(profile, sizes)


def _measure_first(
    pilot: Profile,
    origin: Origin,
    first: str,
    key: str | None,
    *,
    is_quiet: bool,
    simulate: MeasureRun | None,
    tokenizer: AbstractContextManager[Tokenizer] | None,
) -> Path:
    """Measure what an experiment rests on, which ``first`` names, in a directory beside that of ``origin``.

    Returns the directory, which ``key`` may name for another start. Where a run failed, the command ends.
    """
    prepared = prepare_experiment(pilot, tokenizer=tokenizer)
    create = create_experiment if simulate is None else create_simulation
    results = create(pilot, prepared, replace(origin, directory=None, is_elsewhere=False))
    say(f"{first}, results in {results.path}")
    again = (
        "Start again"
        if key is None
        else f"Set {key}={shlex.quote(str(results.path))} once it is measured, or start again"
    )
    outcome = measure(results, pilot, prepared.sets, again, is_quiet=is_quiet, simulate=simulate)
    if outcome.num_failed:
        warn(f"{pilot.name!r} could not be measured, so nothing that rests on it was begun")
        raise typer.Exit(exit_code_of(outcome.num_failed, 0))
    return results.path


def measure(
    results: ResultDirectory,
    profile: Profile,
    requests: RequestSets,
    next_step: str,
    *,
    is_quiet: bool,
    simulate: MeasureRun | None = None,
    keeps_raw_logs: bool = False,
    takes_over: bool = False,
) -> Outcome:
    """Measure, or ``simulate``, the runs that are not done; ``next_step`` is advice for after an interrupt."""
    pending = pending_runs(results, profile)
    warn_of_repeats(results, pending)
    do_run = simulate or measure_run
    progress = experiment_progress(len(pending), len(servers(profile)), is_quiet=is_quiet)
    with advising(next_step), progress as listener:
        if not results.is_divided:
            return run_experiment(results, profile, requests, listener, do_run, keeps_raw_logs=keeps_raw_logs)
        from benchctl.cluster.blocks import run_free_blocks

        return run_free_blocks(
            results,
            profile,
            requests,
            listener,
            do_run,
            keeps_raw_logs=keeps_raw_logs,
            takes_over=takes_over,
            on_owned=warn,
        )


def warn_of_repeats(results: ResultDirectory, pending: Sequence[PlannedRun]) -> None:
    """Name the blocks of which a part was measured elsewhere, so that all their runs are measured again here."""
    nodes_by_block: dict[int, set[str]] = defaultdict(set)
    for _, record in done_runs(results, pending):
        nodes_by_block[record.block].add(record.node_name or "another machine")
    for block, nodes in nodes_by_block.items():
        elsewhere = " and ".join(sorted(nodes - {node_name()})) or "other devices of this node"
        warn(
            f"block {block} was begun on {elsewhere}; all its runs are measured again here, because runs of a "
            "block are compared (earlier attempts are kept in each run's directory)"
        )


class _Course:
    """Shows the runs of an experiment on stderr: as two bars, or where these are disabled a line for each run."""

    def __init__(
        self,
        runs: "tqdm[Any]",
        requests: "tqdm[Any]",
        show_live: Callable[[Sequence[str]], None],
        num_runs: int,
        runs_per_block: int,
    ) -> None:
        self._runs = runs
        self._requests = requests
        self._show_live = show_live
        self._num_runs = num_runs
        self._runs_per_block = runs_per_block
        self._run_id = ""
        self._first_with_tail: dict[str, str] = {}
        """The first run of which the log ended with these lines."""
        self._codes = set[str]()
        """Codes of the warnings of runs that ended."""
        self._num_ended = 0
        self._started_s = self._began_s = self._reported_s = time.monotonic()

    def begin_run(self, planned: PlannedRun, num_requests: int) -> None:
        self._run_id = planned.run_id
        self._began_s = self._reported_s = time.monotonic()
        self._requests.reset(total=num_requests)
        self._requests.set_description(visible_line(planned.run_id))
        self._show_live(())

    def advance(self, num_done: int) -> None:
        self._requests.set_postfix_str("", refresh=False)
        self._requests.update(num_done - self._requests.n)

    def show_log(self, line: str) -> None:
        """Show the last line of the log of a starting server; without bars now and then."""
        now_s = time.monotonic()
        if not self._requests.disable:
            self._requests.set_postfix_str(visible_line(line))
        elif now_s - self._reported_s >= _REPORT_INTERVAL_S:
            self._reported_s = now_s
            note(f"{self._run_id}: the server has been starting for {now_s - self._began_s:.0f} s: {line}")

    def end_run(self, planned: PlannedRun, record: RunRecord) -> None:
        """Count a run; print a line on it, unless the bars show it, and after the first block the time left."""
        self._runs.update(1)
        self._num_ended += 1
        if not self._runs.disable and record.state == "done":
            return
        now_s = time.monotonic()
        number = f"[{self._num_ended}/{self._num_runs}]"
        parts = [f"{number} {planned.run_id}: {record.state} in {now_s - self._began_s:.1f} s"]
        lines: list[str] = []
        if record.failure is not None:
            parts.append(visible_line(f"{record.failure.cause}: {record.failure.message}"))
            tail = record.failure.log_tail.splitlines()[-_TAIL_LINES:]
            first = self._first_with_tail.setdefault("\n".join(tail), planned.run_id)
            if first != planned.run_id and tail:
                parts.append(f"its log ends as that of {first}")
            else:
                lines += map(log_line, tail)
        else:
            # Their messages are told once, when all runs have ended; the codes with the first run that has them.
            printed = set[str]() if record.state == "suspect" else self._codes
            codes = dict.fromkeys(each.code for each in record.warnings if each.code not in printed)
            self._codes.update(codes)
            parts += [", ".join(codes)] if codes else []
            num_left = self._num_runs - self._num_ended
            if not record.is_virtual and self._num_ended == self._runs_per_block and num_left:
                block_s = now_s - self._started_s
                left = duration(block_s / self._num_ended * num_left)
                lines.append(f"the first block took {block_s:.0f} s: {left} left")
        self._write("\n".join(["; ".join(parts), *lines]))

    def repeat(self, again: Sequence[PlannedRun]) -> None:
        """Tell that a block is measured once more, and count its runs."""
        self._runs.total = self._num_runs = self._num_runs + len(again)
        self._write(f"block {again[0].block} does not count, and a verdict takes all: it is measured once more")

    def show_loads(self, choice: LoadsChoice) -> None:
        """Tell how many loads each server gets from now on, and why."""
        self._write(f"from block {choice.from_block} on {choice.num_loads} on each server: {choice.reason}")

    def show_look(self, look: Look, rule: StoppingRecord) -> None:
        """Tell what a look at the results has shown, and what follows."""
        from benchctl.analysis.compare.looks import widest_interval

        worst, num_left = widest_interval(look), rule.look_blocks[-1] - look.num_blocks
        target = f"±{percentage(rule.precision_frac or 0.0)}"
        then = "continuing" if num_left else "the blocks are used up"
        saved = f", {num_left} blocks are not needed" if rule.ended_after is not None else ""
        if look.reason is not None:
            words = f"{look.reason}{saved or f'; {then}'}"
        elif look.is_precise:
            words = f"every primary metric is known to {target}{saved}"
        elif worst is None:
            words = f"nothing can be compared; {then}"
        else:
            width = worst.half_width_frac
            precision = f"only {worst.num_blocks} blocks count" if width is None else f"±{percentage(width, 2)}"
            words = f"{worst.metric} in {worst.cell}: {precision}, target {target}; {then}"
        self._write(f"look after {look.num_blocks} blocks: {words}")

    def _write(self, text: str) -> None:
        tqdm.write(folded(visible_lines(text), width_of(sys.stderr)), file=drawing(sys.stderr))


def _import_what_judges() -> None:
    """Import what is needed when a load has ended, while the first server starts: this process only waits then.

    Before, the server would start later; afterwards, it would disturb a load, or one would wait for it.
    """
    import benchctl.cli.outcome  # noqa: F401


@contextmanager
def experiment_progress(num_runs: int, runs_per_block: int, *, is_quiet: bool) -> Iterator[Listener]:
    """Yield the listener that shows progress; with ``is_quiet``, or in CI, as one line per run and no bars."""
    with (
        bar(is_quiet=is_quiet, total=num_runs, desc="runs", unit="run", position=0) as runs,
        bar(
            is_quiet=is_quiet, total=1, desc="requests", unit="req", position=1, leave=False, mininterval=1.0
        ) as requests,
        live_line(position=2, is_quiet=is_quiet) as show_live,
    ):
        course = _Course(runs, requests, show_live, num_runs, runs_per_block)
        yield Listener(
            on_live=None if runs.disable else show_live,
            on_run_start=course.begin_run,
            on_request_end=course.advance,
            on_run_end=course.end_run,
            on_log_line=course.show_log,
            on_server_start=_import_what_judges,
            on_look=course.show_look,
            on_loads=course.show_loads,
            on_repeat=course.repeat,
        )
