"""Steps that ``run`` and ``simulate`` share: check, prepare and create an experiment, and do its runs.

The plan of ``benchctl run``: the ordered runs, their duration and the power of the experiment.
"""

import fcntl
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import typer
from tqdm import tqdm

from benchctl.analysis.experiment.ladder import widest_interval
from benchctl.analysis.planning import power_lines
from benchctl.analysis.stopping_rule import stopping_rule
from benchctl.cli.checks import A_RUN_FAILED
from benchctl.cli.commands.profiles import check_names
from benchctl.cli.failures import drawing, log_line
from benchctl.cli.output.verdicts import duration_text, estimate_plan, print_prediction
from benchctl.cli.screen import has_room_for_bars, warn, wide_console
from benchctl.engines.engine import engine_for
from benchctl.errors import EngineUnavailableError, UsageError
from benchctl.formats import count_of, duration, percentage
from benchctl.measure.experiment import (
    Listener,
    MeasureRun,
    Outcome,
    create_experiment,
    create_simulation,
    run_experiment,
)
from benchctl.measure.kv_memory import KvPlan, plan_kv_memory
from benchctl.measure.node import node_name
from benchctl.measure.result_directory import Origin
from benchctl.measure.resume.here import Here
from benchctl.measure.resume.pending import pending_runs, repeated_runs
from benchctl.measure.run import measure_run
from benchctl.measure.shared.free_blocks import run_free_blocks
from benchctl.measure.simulated_check import check_simulated
from benchctl.measure.tokenizing.choice import planning_tokenizer, prepare_counted, tokenizer_for
from benchctl.profile.engine_options import own_variables
from benchctl.profile.model import Profile
from benchctl.profile.planning import Imbalance, arms, balanced_numbers, imbalance_of, plan_runs, variant_settings
from benchctl.records.claims import CLAIMS, is_shared
from benchctl.records.directory import ResultDirectory, arm_label, cell_name
from benchctl.records.noise import NoiseFloor
from benchctl.records.record import Look, PlannedRun, PreparedRequest, RunRecord, StoppingRecord
from benchctl.records.schema import ResultWarning
from benchctl.report.table import table_of
from benchctl.report.tables.experiment import prompt_lengths_text
from benchctl.untrusted.text import visible_line, visible_lines
from benchctl.workload.natural_lengths import KEY as LENGTHS_KEY
from benchctl.workload.natural_lengths import lengths_profile, needs_lengths
from benchctl.workload.prepare import PreparedSet
from benchctl.workload.tokenizers.files import KEY
from benchctl.workload.tokenizers.tokenizer import Tokenizer


def check_experiment(profile: Profile, *, is_plan: bool = False) -> None:
    """Raise UsageError for an experiment that cannot be measured here, before it begins.

    A plan may be made on another machine than the one that measures: a missing engine is then a warning.
    """
    check_names(profile)
    for name in sorted(set(own_variables()).intersection(os.environ)):
        warn(f"{name} is set in this environment and not passed on to servers: benchctl sets it from the profile")
    engine = engine_for(profile.engine.kind)
    problems: dict[str, None] = {}  # each once, in the order of the arms
    for variant, cell in arms(profile):
        try:
            engine.check_available(variant_settings(profile, variant, cell))
        except EngineUnavailableError as error:
            problems[str(error)] = None
    if problems and not is_plan:
        raise EngineUnavailableError("\n".join(problems))
    for problem in problems:
        warn(f"not to be measured on this machine: {problem}")


def share_kv_memory(profile: Profile, *, is_plan: bool = False) -> KvPlan:
    """One size of KV cache for all servers, where some load a value model.

    Raises UsageError where none fits; of a plan it is a warning. An experiment in which it is left to vLLM warns.
    """
    plan = plan_kv_memory(profile)
    if plan.reason is not None and plan.text is not None and not is_plan:
        warn(plan.text)
    if plan.refusal is not None:
        if not is_plan:
            raise UsageError(plan.refusal)
        warn(f"not to be measured on this machine: {plan.refusal}")
    return plan


@contextmanager
def reporting_alone(results: Path) -> Iterator[None]:
    """Wait for another command that writes reports of a shared directory, as far as its file system has locks."""
    if not is_shared(results):
        yield
        return
    handle = os.open(results / CLAIMS, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def tokenizer_of(profile: Profile, *, may_start_server: bool = True) -> AbstractContextManager[Tokenizer]:
    """The tokenizer that counts the prompts of an experiment; it says when it starts a server for that.

    Where none may be started, as on a login node, that raises UsageError with what to do instead.
    """

    def refuse(_text: str) -> None:
        raise UsageError(
            f"profile {profile.name}: the prompts can be counted only by a server of {profile.model}, and --on "
            f"slurm starts none on the machine that submits; name a tokenizer with {KEY}: a directory with "
            "tokenizer.json, or a repository of the model hub"
        )

    return tokenizer_for(profile, (lambda text: print(text, flush=True)) if may_start_server else refuse)


def prepare_experiment(
    profile: Profile,
    lengths_from: Path | None = None,
    *,
    tokenizer: AbstractContextManager[Tokenizer] | None = None,
) -> PreparedSet:
    """The request set, which the engine can serve; warnings about it are printed.

    ``tokenizer`` counts it; without one, as for a plan, no server is asked.
    """
    engine = engine_for(profile.engine.kind)
    with tokenizer or nullcontext(planning_tokenizer(profile)) as counting:
        prepared = prepare_counted(profile, counting, lengths_from)
    settings = [variant_settings(profile, variant, cell) for variant, cell in arms(profile)]
    for each in settings:
        engine.check_requests(prepared.requests, each)
    if profile.engine.kind == "sim":
        check_simulated(settings, prepared.requests)
    for warning in prepared.warnings:
        warn(warning.message)
    return prepared


def measure_lengths(
    profile: Profile,
    output_dir: Path,
    label: str | None,
    *,
    is_quiet: bool,
    simulate: MeasureRun | None = None,
    tokenizer: AbstractContextManager[Tokenizer] | None = None,
) -> Path | None:
    """Measure the natural lengths that ``profile`` needs; returns their result directory, None if it needs none."""
    if not needs_lengths(profile):
        return None
    pilot = lengths_profile(profile)
    prepared = prepare_experiment(pilot, tokenizer=tokenizer)
    results = create(pilot, prepared, output_dir, label, is_simulated=simulate is not None)
    print(f"natural lengths first: {profile.baseline} once, results in {results.path}", flush=True)
    next_step = f"Set {LENGTHS_KEY}={shlex.quote(str(results.path))} once it is measured, or start again"
    outcome = measure(results, pilot, prepared.requests, next_step, is_quiet=is_quiet, simulate=simulate)
    if outcome.num_failed:
        warn(f"the natural lengths could not be measured, so {profile.name!r} was not begun")
        raise typer.Exit(A_RUN_FAILED)
    return results.path


def create(
    profile: Profile,
    prepared: PreparedSet,
    output_dir: Path,
    label: str | None,
    *,
    directory: Path | None = None,
    is_simulated: bool = False,
    is_elsewhere: bool = False,
    notes: tuple[ResultWarning, ...] = (),
) -> ResultDirectory:
    """A new result directory, which holds all that is known before the first run: ``directory`` where it is given,
    else one below ``output_dir``. ``notes`` go into its manifest. With ``is_elsewhere`` other machines measure.
    """
    argv = ("benchctl", *sys.argv[1:])
    origin = Origin(
        output_root=output_dir,
        label=label,
        argv=argv,
        directory=directory,
        is_elsewhere=is_elsewhere,
        notes=notes,
    )
    return (create_simulation if is_simulated else create_experiment)(profile, prepared, origin)


def measure(
    results: ResultDirectory,
    profile: Profile,
    requests: tuple[PreparedRequest, ...],
    next_step: str,
    *,
    is_quiet: bool,
    simulate: MeasureRun | None = None,
    keeps_raw_logs: bool = False,
) -> Outcome:
    """Measure, or ``simulate``, the runs that are not done; ``next_step`` is advice for after an interrupt."""
    is_quiet = is_quiet or bool(os.environ.get("CI"))
    pending = pending_runs(results, Here(profile))
    warn_of_repeats(results, pending)
    try:
        with experiment_progress(len(pending), len(arms(profile)), is_quiet=is_quiet) as listener:
            do_run = simulate or measure_run
            if is_shared(results.path):
                return run_free_blocks(
                    results,
                    profile,
                    requests,
                    listener,
                    do_run,
                    keeps_raw_logs=keeps_raw_logs,
                    lease_s=profile.cluster.lease_s,
                    on_claimed=warn,
                    on_wait=lambda text: print(text, file=sys.stderr, flush=True),
                )
            return run_experiment(results, profile, requests, listener, do_run, keeps_raw_logs=keeps_raw_logs)
    except KeyboardInterrupt:
        print(f"interrupted; results until now are kept. {next_step}", file=sys.stderr)
        raise


def print_plan(
    profile: Profile,
    requests: Sequence[PreparedRequest],
    noise: NoiseFloor | None,
    step_time_model: Path | None = None,
) -> None:
    """Print all runs in order, their predicted durations and loads, and the power of the experiment."""
    estimate = estimate_plan(profile, requests, step_time_model)
    plan = plan_runs(profile)
    _print_runs(plan.runs, estimate.run_s)
    what = (
        f"{count_of(len(plan.runs), 'run')} in {count_of(profile.blocks, 'block')} of {len(arms(profile))}, "
        f"{count_of(len(requests), 'request')} each"
    )
    print(f"{what}; {duration_text(profile, estimate)}")
    if (lengths := prompt_lengths_text(requests, profile.engine.kind)) is not None:
        print(f"prompts of {lengths}")
    print_prediction(estimate)
    if len(arms(profile)) > 1:
        print(balance_text(imbalance_of(plan.runs, profile.baseline), len(arms(profile)), profile.blocks))
    print_power(profile, noise)


def print_rest(
    profile: Profile,
    requests: Sequence[PreparedRequest],
    runs: Sequence[PlannedRun],
    num_planned: int,
    step_time_model: Path | None = None,
) -> None:
    """Print the runs that are left of ``num_planned``, and their predicted duration where that is known."""
    estimate = estimate_plan(profile, requests, step_time_model)
    if runs:
        _print_runs(runs, estimate.run_s)
    total_s = sum(estimate.run_s.get(arm_label(run.variant, run.cell), 0.0) for run in runs)
    lasting = f"; estimated duration {total_s:.0f} s" if runs and estimate.run_s else ""
    print(f"{len(runs)} of {count_of(num_planned, 'run')} left to measure{lasting}")


def warn_of_repeats(results: ResultDirectory, pending: Sequence[PlannedRun]) -> None:
    """Name the blocks of which a part was measured elsewhere, so that all their runs are measured again here."""
    nodes_by_block: dict[int, set[str]] = {}
    for record in repeated_runs(results, pending):
        nodes_by_block.setdefault(record.block, set()).add(record.node_name or "another machine")
    for block, nodes in nodes_by_block.items():
        elsewhere = " and ".join(sorted(nodes - {node_name()})) or "other devices of this node"
        warn(
            f"block {block} was begun on {elsewhere}; all its runs are measured again here, because runs of a "
            "block are compared (earlier attempts are kept in each run's directory)"
        )


def _print_runs(runs: Sequence[PlannedRun], durations_s: Mapping[str, float]) -> None:
    """Print a table of runs, with the durations of those arms that have one."""
    headings = ("run", "block", "position", "variant", "cell", *(["estimated s"] if durations_s else []))
    rows = []
    for planned in runs:
        duration_s = durations_s.get(arm_label(planned.variant, planned.cell))
        last = [] if duration_s is None else [f"{duration_s:.1f}"]
        rows.append(
            (planned.run_id, planned.block, planned.position, planned.variant, cell_name(planned.cell), *last)
        )
    wide_console().print(table_of(headings, rows, left=("run", "variant", "cell")))


def print_kv_memory(text: str | None) -> None:
    """Print the KV cache of the servers in one sentence, where there is anything to say of it."""
    if text is not None:
        print(text, flush=True)


def balance_text(imbalance: Imbalance, num_arms: int, num_blocks: int) -> str:
    """The balance of the order: by how much it is unbalanced, and the numbers of blocks that would balance it."""
    if imbalance.is_balanced:
        return "order: balanced, each arm runs in each position and after each other arm equally often"
    numbers = " or ".join(str(number) for number in balanced_numbers(num_arms, num_blocks) if number)
    return (
        f"order: not fully balanced; mean positions differ from the baseline's by up to "
        f"{imbalance.position_difference:.2g}, the counts of an arm in two positions by up to "
        f"{imbalance.position_spread}, the counts of one arm after another by up to "
        f"{imbalance.predecessor_spread}; balanced with {numbers} blocks"
    )


def print_power(profile: Profile, noise: NoiseFloor | None) -> None:
    """Print the power of the experiment with its blocks, and its stopping rule."""
    has_steps = engine_for(profile.engine.kind).has_steps
    for line in power_lines(profile, noise, has_steps):
        print(line)
    rule = stopping_rule(profile)
    if rule is not None:
        print(rule_text(rule))


def rule_text(rule: StoppingRecord) -> str:
    """The rule in words, with the looks that are known before the first run."""
    looks = ", ".join(str(blocks) for blocks in rule.look_blocks)
    return (
        f"ends early when every primary metric in every cell is known to ±{percentage(rule.precision_frac)} (half "
        f"the {percentage(rule.confidence, 4)} interval); looks after block {looks}"
    )


def look_text(look: Look, rule: StoppingRecord) -> str:

    worst = widest_interval(look)
    target = f"±{percentage(rule.precision_frac)}"
    begin = f"look after {look.num_blocks} blocks:"
    if look.is_precise:
        saved = (
            "" if rule.ended_after is None else f", {rule.look_blocks[-1] - look.num_blocks} blocks are not needed"
        )
        return f"{begin} every primary metric is known to {target}{saved}"
    then = "the blocks are used up" if look.num_blocks == rule.look_blocks[-1] else "continuing"
    if worst is None:
        return f"{begin} nothing can be compared; {then}"
    precision = (
        f"only {worst.num_blocks} blocks count"
        if worst.half_width_frac is None
        else f"±{percentage(worst.half_width_frac, 2)}"
    )
    return f"{begin} {worst.metric} in {worst.cell}: {precision}, target {target}; {then}"


def print_duration(profile: Profile, requests: Sequence[PreparedRequest]) -> None:
    """Print the estimated duration of an experiment on a real engine; a simulated one ends soon."""
    if profile.engine.kind != "sim":
        print(duration_text(profile, estimate_plan(profile, requests)), flush=True)


_REPORT_INTERVAL_S: Final = 10.0


_TAIL_LINES: Final = 8
"""Lines shown of the log of a server that failed; the record keeps more."""


@dataclass(slots=True)
class _Course:
    """Progress of the experiment and start of the current run."""

    num_runs: int
    runs_per_block: int = 1
    started_s: float = field(default_factory=time.monotonic)
    run_id: str = ""
    began_s: float = 0.0
    reported_s: float = 0.0
    num_ended: int = 0

    def begin_run(self, planned: PlannedRun) -> None:
        self.run_id = planned.run_id
        self.began_s = self.reported_s = time.monotonic()

    def waiting(self, line: str) -> str | None:
        """A line on the progress of a starting server; None while the last one is recent."""
        now_s = time.monotonic()
        if now_s - self.reported_s < _REPORT_INTERVAL_S:
            return None
        self.reported_s = now_s
        return f"{self.run_id}: the server has been starting for {now_s - self.began_s:.0f} s: {line}"

    def end_run(self, planned: PlannedRun, record: RunRecord) -> str:
        """Count a run that has ended; returns a line on it, and after the first block the time left."""
        self.num_ended += 1
        duration_s = time.monotonic() - self.began_s
        text = f"[{self.num_ended}/{self.num_runs}] {planned.run_id}: {record.state} in {duration_s:.1f} s"
        if record.failure is not None:
            tail = record.failure.log_tail.splitlines()[-_TAIL_LINES:]
            message = visible_line(f"{record.failure.cause}: {record.failure.message}")
            return "\n".join([f"{text}; {message}", *map(log_line, tail)])
        line = "; ".join([text, *(visible_line(f"{each.code}: {each.message}") for each in record.warnings)])
        return f"{line}\n{left}" if record.clock != "virtual" and (left := self._left()) else line

    def _left(self) -> str | None:
        num_left = self.num_runs - self.num_ended
        if self.num_ended != self.runs_per_block or not num_left:
            return None
        per_run_s = (time.monotonic() - self.started_s) / self.num_ended
        return f"the first block took {per_run_s * self.num_ended:.0f} s: {duration(per_run_s * num_left)} left"


@contextmanager
def experiment_progress(num_runs: int, runs_per_block: int, *, is_quiet: bool) -> Iterator[Listener]:
    """Yield the listener that shows progress; with ``is_quiet`` one line per run on stderr and no bars."""
    course = _Course(num_runs=num_runs, runs_per_block=runs_per_block)
    stderr = drawing(sys.stderr)
    hidden = is_quiet or not has_room_for_bars()
    bar = partial(tqdm, disable=hidden, file=stderr)
    with (
        bar(total=num_runs, desc="runs", unit="run", position=0) as runs,
        tqdm(
            total=1, desc="requests", unit="req", disable=hidden, position=1, leave=False, file=stderr
        ) as requests,
    ):

        def started(planned: PlannedRun, num_requests: int) -> None:
            course.begin_run(planned)
            requests.reset(total=num_requests)
            requests.set_description(visible_line(planned.run_id))

        def advanced(num_done: int) -> None:
            requests.set_postfix_str("", refresh=False)
            requests.update(num_done - requests.n)

        def log_changed(line: str) -> None:
            if not hidden:
                requests.set_postfix_str(visible_line(line))
            elif report := course.waiting(line):
                print(report, file=sys.stderr, flush=True)

        def ended(planned: PlannedRun, record: RunRecord) -> None:
            runs.update(1)
            line = course.end_run(planned, record)
            if hidden:
                print(line, file=sys.stderr, flush=True)
            elif record.state != "done":  # the bars show the others
                tqdm.write(visible_lines(line), file=stderr)

        yield Listener(
            on_run_start=started,
            on_request_end=advanced,
            on_run_end=ended,
            on_log_line=log_changed,
            on_look=lambda look, rule: tqdm.write(visible_lines(look_text(look, rule)), file=stderr),
        )
