"""``benchctl run``, before anything is measured: the ordered runs, how long they take, what they can show."""

from typing import TYPE_CHECKING

from benchctl.formats import duration, percentage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.measure.durations import DurationEstimate
    from benchctl.profile.model import Profile
    from benchctl.profile.planning.imbalance import Imbalance
    from benchctl.records.manifest import Look, StoppingRecord
    from benchctl.records.noise import NoiseFloor
    from benchctl.records.request import PreparedRequest


def print_plan(profile: "Profile", requests: "Sequence[PreparedRequest]", noise: "NoiseFloor | None") -> None:
    """Print every run in order, how long each and all will take as far as that is known, and what they can show."""
    from rich.table import Table

    from benchctl.cli.screen import wide_console
    from benchctl.profile.planning.imbalance import imbalance_of
    from benchctl.profile.planning.plan import arms, plan_runs
    from benchctl.records.directory import arm_label, cell_name

    estimate = _estimated(profile, requests)
    durations_s = {} if estimate is None else estimate.run_s
    table = Table(
        "run", "block", "position", "variant", "cell", *(["estimated s"] if durations_s else []), box=None
    )
    plan = plan_runs(profile)
    for planned in plan.runs:
        duration_s = durations_s.get(arm_label(planned.variant, planned.cell))
        last = [] if duration_s is None else [f"{duration_s:.1f}"]
        place = str(planned.block), str(planned.position)
        table.add_row(planned.run_id, *place, planned.variant, cell_name(planned.cell), *last)
    wide_console().print(table)
    what = (
        f"{len(plan.runs)} runs in {profile.blocks} blocks of {len(arms(profile))}, {len(requests)} requests each"
    )
    print(f"{what}; {_how_long(profile, estimate)}")
    if len(arms(profile)) > 1:
        print(balance_text(imbalance_of(plan.runs, profile.baseline), len(arms(profile)), profile.blocks))
    print_power(profile, noise)


def balance_text(imbalance: "Imbalance", num_arms: int, num_blocks: int) -> str:
    """Whether the order is balanced; where it is not, by how much, and with how many blocks it would be."""
    from benchctl.profile.planning.balance import balanced_numbers

    if imbalance.is_balanced:
        return "order: balanced, each arm runs in each position and after each other arm equally often"
    numbers = " or ".join(str(number) for number in balanced_numbers(num_arms, num_blocks) if number)
    return (
        f"order: not wholly balanced; mean positions differ from the baseline's by up to "
        f"{imbalance.position_difference:.2g}, the counts of an arm in two positions by up to "
        f"{imbalance.position_spread}, the counts of one arm after another by up to "
        f"{imbalance.predecessor_spread}; balanced with {numbers} blocks"
    )


def print_power(profile: "Profile", noise: "NoiseFloor | None") -> None:
    """Print what the experiment can show with its blocks, and by which rule it may end early."""
    from benchctl.analysis.planning.power import estimate_power, power_lines
    from benchctl.analysis.statistics.stopping_rule import stopping_rule

    power, rule = estimate_power(profile, noise), stopping_rule(profile)
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
    """What a look saw, and what follows from it."""
    from benchctl.analysis.experiment.stopping import widest

    worst = widest(look)
    wanted = f"±{percentage(rule.precision_frac)}"
    begin = f"look after {look.num_blocks} blocks:"
    if look.is_precise:
        saved = (
            "" if rule.ended_after is None else f", {rule.look_blocks[-1] - look.num_blocks} blocks are not needed"
        )
        return f"{begin} every primary metric is known to {wanted}{saved}"
    then = "the blocks are used up" if look.num_blocks == rule.look_blocks[-1] else "going on"
    if worst is None:
        return f"{begin} nothing can be compared; {then}"
    known = (
        f"only {worst.num_blocks} blocks count"
        if worst.half_width_frac is None
        else f"±{percentage(worst.half_width_frac, 2)}"
    )
    return f"{begin} {worst.metric} in {worst.cell}: {known}, wanted {wanted}; {then}"


def print_duration(profile: "Profile", requests: "Sequence[PreparedRequest]") -> None:
    """Print how long an experiment on a real engine will take; a simulated one is over soon."""
    if profile.engine.kind != "sim":
        print(_how_long(profile, _estimated(profile, requests)), flush=True)


def _how_long(profile: "Profile", estimate: "DurationEstimate | None") -> str:
    """The duration of all blocks, and how it is known."""
    from benchctl.profile.planning.plan import plan_runs
    from benchctl.records.directory import arm_label

    if estimate is None:
        return (
            f"how long it takes is unknown: no earlier run of {profile.engine.kind} with {profile.model} on this "
            "machine; the first block will tell"
        )
    runs_s = sum(estimate.run_s[arm_label(run.variant, run.cell)] for run in plan_runs(profile).runs)
    total_s = runs_s + estimate.around_s
    at_most = " at most" if profile.stopping is not None else ""
    earlier = "1 earlier run" if estimate.num_runs == 1 else f"{estimate.num_runs} earlier runs"
    known = f", by {earlier} on this machine" if estimate.num_runs else ""
    in_words = f" ({duration(total_s)})" if total_s >= 100 else ""
    return f"estimated duration {total_s:.0f} s{in_words}{at_most}{known}"


def _estimated(profile: "Profile", requests: "Sequence[PreparedRequest]") -> "DurationEstimate | None":
    """Duration by arm: simulated beforehand, or by earlier runs of a real engine; None where nothing says it."""
    from benchctl.measure.durations import DurationEstimate, estimate_durations
    from benchctl.measure.telemetry.gpu import gpu_inventory
    from benchctl.profile.planning.plan import arms, variant_settings
    from benchctl.records.directory import arm_label
    from benchctl.sim.estimate import estimated_run_s

    if profile.engine.kind != "sim":
        return estimate_durations(profile, requests, [gpu.name for gpu in gpu_inventory()])
    arrival = profile.workload.arrival
    run_s = {
        arm_label(variant, cell): estimated_run_s(variant_settings(profile, variant, cell), requests, arrival)
        for variant, cell in arms(profile)
    }
    return DurationEstimate(run_s=run_s, num_runs=0)
