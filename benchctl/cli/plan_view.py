"""``benchctl run --dry-run``: the ordered runs, and how long they will take."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.profile.model import Profile
    from benchctl.records.run import PreparedRequest


def print_plan(profile: "Profile", requests: "Sequence[PreparedRequest]") -> None:
    """Print every run in order, and on a simulator how long each and all will take."""
    from rich.table import Table

    from benchctl.cli.screen import wide_console
    from benchctl.profile.plan import arms, plan_runs
    from benchctl.records.directory import arm_label, cell_name

    durations_s = _estimated_s(profile, requests)
    table = Table(
        "run", "block", "position", "variant", "cell", *(["estimated s"] if durations_s else []), box=None
    )
    plan = plan_runs(profile)
    total_s = 0.0
    for planned in plan.runs:
        duration_s = durations_s.get(arm_label(planned.variant, planned.cell))
        total_s += duration_s or 0.0
        last = [] if duration_s is None else [f"{duration_s:.1f}"]
        place = str(planned.block), str(planned.position)
        table.add_row(planned.run_id, *place, planned.variant, cell_name(planned.cell), *last)
    wide_console().print(table)
    what = (
        f"{len(plan.runs)} runs in {profile.blocks} blocks of {len(arms(profile))}, {len(requests)} requests each"
    )
    how_long = f"estimated duration {total_s:.0f} s" if durations_s else "how long a real server takes is unknown"
    print(f"{what}; {how_long}")


def _estimated_s(profile: "Profile", requests: "Sequence[PreparedRequest]") -> dict[str, float]:
    """Duration by arm, simulated beforehand; empty for engines that are no simulator."""
    from benchctl.profile.plan import arms, variant_settings
    from benchctl.records.directory import arm_label
    from benchctl.sim.estimate import estimated_run_s

    if profile.engine.kind != "sim":
        return {}
    arrival = profile.workload.arrival
    return {
        arm_label(variant, cell): estimated_run_s(variant_settings(profile, variant, cell), requests, arrival)
        for variant, cell in arms(profile)
    }
