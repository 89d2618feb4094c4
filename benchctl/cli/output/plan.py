"""The plan of ``benchctl run``: the ordered runs, their duration and the power of the experiment."""

from typing import TYPE_CHECKING

from benchctl.formats import count_of, percentage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchctl.profile.model import Profile
    from benchctl.profile.planning.imbalance import Imbalance
    from benchctl.records.directory import ResultDirectory
    from benchctl.records.manifest import Look, PlannedRun, StoppingRecord
    from benchctl.records.noise import NoiseFloor
    from benchctl.records.request import PreparedRequest


def print_plan(
    profile: "Profile",
    requests: "Sequence[PreparedRequest]",
    noise: "NoiseFloor | None",
    step_time_model: "Path | None" = None,
) -> None:
    """Print all runs in order, their predicted durations and loads, and the power of the experiment."""
    from benchctl.cli.output.prediction import duration_text, estimate_plan, print_prediction
    from benchctl.profile.planning.imbalance import imbalance_of
    from benchctl.profile.planning.plan import arms, plan_runs
    from benchctl.report.text.prompt_lengths import prompt_lengths_text

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
    profile: "Profile",
    requests: "Sequence[PreparedRequest]",
    runs: "Sequence[PlannedRun]",
    num_planned: int,
    step_time_model: "Path | None" = None,
) -> None:
    """Print the runs that are left of ``num_planned``, and their predicted duration where that is known."""
    from benchctl.cli.output.prediction import estimate_plan
    from benchctl.records.directory import arm_label

    estimate = estimate_plan(profile, requests, step_time_model)
    if runs:
        _print_runs(runs, estimate.run_s)
    total_s = sum(estimate.run_s.get(arm_label(run.variant, run.cell), 0.0) for run in runs)
    lasting = f"; estimated duration {total_s:.0f} s" if runs and estimate.run_s else ""
    print(f"{len(runs)} of {count_of(num_planned, 'run')} left to measure{lasting}")


def warn_of_repeats(results: "ResultDirectory", pending: "Sequence[PlannedRun]") -> None:
    """Name the blocks of which a part was measured elsewhere, so that all their runs are measured again here."""
    from benchctl.cli.output.outcome import warn
    from benchctl.measure.node import node_name
    from benchctl.measure.resume.pending import repeated_runs

    nodes_by_block: dict[int, set[str]] = {}
    for record in repeated_runs(results, pending):
        nodes_by_block.setdefault(record.block, set()).add(record.node_name or "another machine")
    for block, nodes in nodes_by_block.items():
        elsewhere = " and ".join(sorted(nodes - {node_name()})) or "other devices of this node"
        warn(
            f"block {block} was begun on {elsewhere}; all its runs are measured again here, because runs of a "
            "block are compared (earlier attempts are kept in each run's directory)"
        )


def _print_runs(runs: "Sequence[PlannedRun]", durations_s: "Mapping[str, float]") -> None:
    """Print a table of runs, with the durations of those arms that have one."""
    from rich.table import Table

    from benchctl.cli.output.screen import wide_console
    from benchctl.records.directory import arm_label, cell_name

    table = Table(
        "run", "block", "position", "variant", "cell", *(["estimated s"] if durations_s else []), box=None
    )
    for planned in runs:
        duration_s = durations_s.get(arm_label(planned.variant, planned.cell))
        last = [] if duration_s is None else [f"{duration_s:.1f}"]
        position = str(planned.block), str(planned.position)
        table.add_row(planned.run_id, *position, planned.variant, cell_name(planned.cell), *last)
    wide_console().print(table)


def print_kv_memory(text: str | None) -> None:
    """Print the KV cache of the servers in one sentence, where there is anything to say of it."""
    if text is not None:
        print(text, flush=True)


def balance_text(imbalance: "Imbalance", num_arms: int, num_blocks: int) -> str:
    """The balance of the order: by how much it is unbalanced, and the numbers of blocks that would balance it."""
    from benchctl.profile.planning.balance import balanced_numbers

    if imbalance.is_balanced:
        return "order: balanced, each arm runs in each position and after each other arm equally often"
    numbers = " or ".join(str(number) for number in balanced_numbers(num_arms, num_blocks) if number)
    return (
        f"order: not fully balanced; mean positions differ from the baseline's by up to "
        f"{imbalance.position_difference:.2g}, the counts of an arm in two positions by up to "
        f"{imbalance.position_spread}, the counts of one arm after another by up to "
        f"{imbalance.predecessor_spread}; balanced with {numbers} blocks"
    )


def print_power(profile: "Profile", noise: "NoiseFloor | None") -> None:
    """Print the power of the experiment with its blocks, and its stopping rule."""
    from benchctl.analysis.planning.power import estimate_power, power_lines
    from benchctl.analysis.planning.stopping_rule import stopping_rule
    from benchctl.engines.engine import engine_for

    has_steps = engine_for(profile.engine.kind).has_steps
    power, rule = estimate_power(profile, noise, has_steps), stopping_rule(profile)
    for line in () if power is None else power_lines(power):
        print(line)
    if rule is not None:
        print(rule_text(rule))


def rule_text(rule: "StoppingRecord") -> str:
    """The rule in words, with the looks that are known before the first run."""
    looks = ", ".join(str(blocks) for blocks in rule.look_blocks)
    return (
        f"ends early when every primary metric in every cell is known to ±{percentage(rule.precision_frac)} (half "
        f"the {percentage(rule.confidence, 4)} interval); looks after block {looks}"
    )


def look_text(look: "Look", rule: "StoppingRecord") -> str:
    from benchctl.analysis.experiment.stopping import widest_interval

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


def print_duration(profile: "Profile", requests: "Sequence[PreparedRequest]") -> None:
    """Print the estimated duration of an experiment on a real engine; a simulated one ends soon."""
    from benchctl.cli.output.prediction import duration_text, estimate_plan

    if profile.engine.kind != "sim":
        print(duration_text(profile, estimate_plan(profile, requests)), flush=True)
