"""The plan of an experiment before it is measured: its runs in order, their durations and loads as far as they are
known, and the power of the experiment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchctl.cli.screen import say, warn
from benchctl.engines.engine import engine_for
from benchctl.measure.on_file import AROUND_S, PlanEstimate, earlier_overhead_s, estimate_durations
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.profile.engine_table import is_virtual
from benchctl.profile.model import Profile
from benchctl.profile.planning import (
    Imbalance,
    arms,
    balanced_numbers,
    imbalance_of,
    plan_runs,
    server_of,
    servers,
    several_loads_hint,
    stopping_rule,
    variant_settings,
)
from benchctl.profile.settings import load_points, server_part, under_load
from benchctl.profile.sizes import capacity_metric, capacity_text
from benchctl.records.directory import RequestSets, arm_label, cell_name
from benchctl.records.record import PlannedRun
from benchctl.records.schema import Cell
from benchctl.records.stores import NoiseFloor
from benchctl.units import count_of, duration, four_digits, percentage, range_of

if TYPE_CHECKING:
    from benchctl.sim.predict import PredictedRun
    from benchctl.steptime.queueing import PredictedLoad

_WORDS_FROM_S: Final = 100
_TIMES_FROM: Final = 10
_CROWDED_FRAC: Final = 0.95
_WAITING_FROM: Final = 1.05
"""Requests for each row of the batch from which some wait."""


def estimate_plan(
    profile: Profile,
    requests: RequestSets,
    model: Path | None = None,
    *,
    visible: str | None = None,
) -> PlanEstimate:
    """Durations by the step-time model that is named, else from earlier runs here, else by the roofline.

    ``visible`` names the devices of the servers, where CUDA_VISIBLE_DEVICES is another one for them. Raises
    UsageError for a step-time model that is damaged or of another hardware.
    """
    from benchctl.sim.predict import predict_plan

    gpus, is_simulated = [gpu.name for gpu in gpu_inventory(visible)], is_virtual(profile.engine.kind)
    predicted = predict_plan(profile, requests, gpus, model)
    if model is None and profile.step_time_model is None and not is_simulated:
        earlier = estimate_durations(profile, requests, gpus)
        if earlier is not None:
            return replace(earlier, prediction=None if isinstance(predicted, str) else predicted)
    if isinstance(predicted, str):
        return PlanEstimate(run_s={}, around_s=0.0, basis=predicted)
    overhead_s = earlier_overhead_s(profile, gpus) if predicted.overhead_s is None else predicted.overhead_s
    run_s = dict[str, float]()
    for arm in arms(profile):
        label = arm_label(*server_of(profile, *arm))
        load_s = profile.num_loads * predicted.runs[arm_label(*arm)].load_s
        run_s[label] = run_s.get(label, overhead_s or 0.0) + load_s
    return PlanEstimate(
        run_s=run_s,
        around_s=0.0 if is_simulated else AROUND_S,
        basis=predicted.basis,
        overhead_s=overhead_s,
        prediction=predicted,
    )


def duration_text(profile: Profile, estimate: PlanEstimate) -> str:
    """``estimated duration 240 s (4 min)``, with what it leaves out; or that it is unknown.

    A second line where real servers take longer to start than to serve their load: how much, and a load as long.
    """
    if not estimate.run_s:
        return (
            f"duration unknown: no earlier run of {profile.engine.kind} with {profile.model} on this machine; the "
            "first block will show it"
        )
    runs = plan_runs(profile).runs
    total_s = estimate.total_s(runs) + estimate.around_s
    text = f"{total_s:.0f} s{f' ({duration(total_s)})' if total_s >= _WORDS_FROM_S else ''}"
    text += " at most" if profile.stopping is not None else ""
    text += f", {estimate.basis}" if estimate.basis.startswith("from ") else ""
    if estimate.overhead_s is None:
        return (
            f"estimated duration of the loads {text}; {count_of(len(runs), 'server start')} come on top, "
            "unmeasured here"
        )
    load_s = estimate.total_s(runs) / len(runs) - estimate.overhead_s
    if is_virtual(profile.engine.kind) or load_s >= estimate.overhead_s:
        return f"estimated duration {text}"
    number = ceil(profile.workload.num_prompts * estimate.overhead_s / load_s)
    return (
        f"estimated duration {text}\nof each run {estimate.overhead_s:.0f} s are its server's start and end, "
        f"{load_s:.1f} s its load: with workload.num_prompts={number} both take about as long"
        + several_loads_hint(profile)
    )


def print_prediction(profile: Profile, estimate: PlanEstimate) -> None:
    """Print the origin of the step times, and what they predict: one line for arms that share their loads."""
    prediction = estimate.prediction
    if prediction is None:
        if not estimate.run_s:
            say(estimate.basis)
        return
    say(prediction.basis)
    labels: dict[str, list[str]] = {}
    loads: dict[str, list[PredictedRun]] = {}
    for variant, cell in arms(profile):
        run = prediction.runs[arm_label(variant, cell)]
        loads.setdefault(arm_label(variant, server_part(cell)), []).append(run)
    for label, runs in loads.items():
        labels.setdefault(_loads_text(runs), []).append(label)
    for text, of_load in labels.items():
        say(f"{', '.join(of_load) if len(labels) > 1 else 'load'}: {text}")
    for warning in prediction.warnings:
        warn(warning.message)


def _loads_text(runs: Sequence["PredictedRun"]) -> str:
    """The batch, its latencies and its memory, from the smallest to the largest of several loads; at a rate, how
    much of the server's capacity the highest is.
    """
    busiest = max(runs, key=lambda run: run.offered_rate or 0.0)
    offered, rate, num_preempted = busiest.offered, busiest.offered_rate, sum(run.num_preempted for run in runs)
    kv_frac = max((run.kv_frac for run in runs if run.kv_frac is not None), default=None)
    full = ": it is full" if kv_frac is not None and kv_frac > _CROWDED_FRAC else ""
    largest = max(run.largest_batch for run in runs)
    in_server = range_of([run.in_server for run in runs], four_digits)
    parts = (
        None if offered is None or rate is None else _saturation_text(offered, rate),
        f"{range_of([run.batch for run in runs], four_digits)} rows in a batch on average, {largest} at most",
        f"{in_server} sequences in the server, so that some wait for a row"
        if any(run.in_server > _WAITING_FROM * run.batch for run in runs)
        else None,
        f"step {range_of([run.step_s * 1e3 for run in runs], four_digits)} ms",
        f"first token after {range_of([run.ttft_s * 1e3 for run in runs], four_digits)} ms",
        None if kv_frac is None else f"key-value memory {percentage(kv_frac, 2)} used at most{full}",
        count_of(num_preempted, "preemption") if num_preempted else None,
    )
    return "; ".join(part for part in parts if part is not None)


def _saturation_text(offered: "PredictedLoad", rate: float) -> str:
    part = offered.utilisation
    times = f"{percentage(part)} of" if part < _TIMES_FROM else f"{part:.0f} times"
    most = f"the {four_digits(offered.max_requests_per_s)} that the server completes at most"
    share = f"{four_digits(rate)} requests/s offered, {times} {most}"
    if offered.is_saturated:
        return f"saturated: {share}, so the queue grows while the load lasts"
    return f"{share}, {four_digits(offered.concurrency)} in the server on average"


def print_plan(
    profile: Profile,
    requests: RequestSets,
    noise: NoiseFloor | None,
    step_time_model: Path | None = None,
) -> None:
    """Print all runs in order, their predicted durations and loads, and the power of the experiment."""
    from benchctl.report.experiment_tables import planned_hits_text, prompt_lengths_text

    estimate = estimate_plan(profile, requests, step_time_model)
    plan = plan_runs(profile)
    _print_runs(plan.runs, estimate.run_s)
    times = "" if profile.num_loads == 1 else f" {profile.num_loads} times"
    times += " in the first two blocks" if profile.loads_per_server == "auto" else ""
    num_servers, ladder = len(servers(profile)), plan.runs[0].ladder
    points = f", {len(ladder)} load points on each server one after the other" if ladder else ""
    number = f"{requests.number} request{'' if requests.number == '1' else 's'}"
    say(
        f"{count_of(len(plan.runs), 'run')} in {count_of(profile.blocks, 'block')} of {num_servers}{points}, "
        f"{number} each{times}; {duration_text(profile, estimate)}"
    )
    if (lengths := prompt_lengths_text(requests.requests, profile.engine.kind)) is not None:
        hits = planned_hits_text(requests, profile.workload.prefix)
        say(f"prompts of {lengths}" + ("" if hits is None else f"; {hits}"))
    print_prediction(profile, estimate)
    if num_servers > 1:
        say(_balance_text(imbalance_of(plan.runs, profile.baseline), num_servers, profile.blocks))
    if capacity_metric(profile) is not None:
        say(f"capacity: {capacity_text(profile)}")
    print_power(profile, noise)


def print_rest(
    profile: Profile,
    requests: RequestSets,
    runs: Sequence[PlannedRun],
    num_planned: int,
    step_time_model: Path | None = None,
) -> None:
    """Print the runs that are left of ``num_planned``, and their predicted duration where that is known."""
    estimate = estimate_plan(profile, requests, step_time_model)
    if runs:
        _print_runs(runs, estimate.run_s)
    lasting = f"; estimated duration {estimate.total_s(runs):.0f} s" if runs and estimate.run_s else ""
    say(f"{len(runs)} of {count_of(num_planned, 'run')} left to measure{lasting}")


def _print_runs(runs: Sequence[PlannedRun], durations_s: Mapping[str, float]) -> None:
    """Print a table of runs, with the durations of those arms that have one."""
    from benchctl.cli.screen import text_console
    from benchctl.report.table import table_of

    headings = ("run", "block", "position", "variant", "cell", "loads", *(["estimated s"] if durations_s else []))
    texts = {label: f"{duration_s:.1f}" for label, duration_s in durations_s.items()}
    rows = [
        (
            run.run_id,
            run.block,
            run.position,
            run.variant,
            cell_name(run.cell),
            _ladder_text(run.ladder),
            texts.get(arm_label(run.variant, run.cell), ""),
        )
        for run in runs
    ]
    text_console().print(table_of(headings, rows, left=("run", "variant", "cell", "loads")))


def _balance_text(imbalance: Imbalance, num_arms: int, num_blocks: int) -> str:
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


def _ladder_text(ladder: Sequence[Cell]) -> str:
    """Load points in their order: ``max_concurrency 8, 1, 64``, ``input_len/output_len 64/8, 128/16``."""
    values = ", ".join("/".join(map(str, point.values())) for point in ladder)
    return f"{'/'.join(ladder[0])} {values}" if ladder else ""


def print_changes(profile: Profile) -> None:
    """Print what each variant changes against the baseline, over all of its cells."""
    baseline, *others = arms(under_load(profile, load_points(profile)[0]))
    from benchctl.analysis.compare.answer import change_in_words
    from benchctl.analysis.validity.comparable import Difference, planned_differences

    changes: dict[str, list[Difference]] = {}
    for variant, cell in others:
        sides = variant_settings(profile, *baseline), variant_settings(profile, variant, cell)
        changes.setdefault(variant, []).extend(planned_differences(*sides))
    for variant, differences in changes.items():
        say(f"{variant} against {profile.baseline}: {change_in_words(differences)}")


def print_power(profile: Profile, noise: NoiseFloor | None) -> None:
    """Print the power of the experiment with its blocks, and its stopping rule with the looks that are known.

    It is printed at once, also into a pipe: it belongs before the runs.
    """
    from benchctl.analysis.planning import power_lines, precision_on_file

    lines = list(power_lines(profile, noise, engine_for(profile.engine.kind).has_steps))
    if noise is not None and (precision := precision_on_file(noise, profile)) is not None:
        lines.append(f"precision: {precision}")
    if (rule := stopping_rule(profile)) is not None:
        until = "has its verdict, or when none is likely by the last block"
        if rule.precision_frac is not None:
            until = f"is known to ±{percentage(rule.precision_frac)} (half its interval)"
        confidences = f"{percentage(rule.confidence, 4)}, of the last {percentage(rule.last_confidence, 4)}"
        lines.append(f"ends early when every primary metric in every cell {until}")
        lines.append(f"looks after block {', '.join(map(str, rule.look_blocks))}: intervals of {confidences}")
    for line in lines:
        say(line)
