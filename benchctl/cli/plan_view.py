"""``benchctl run --dry-run``: the ordered runs, and how long they will take."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.profile.model import Profile
    from benchctl.records.run import PreparedRequest


def print_plan(profile: "Profile", requests: "Sequence[PreparedRequest]") -> None:
    """Print every run in order with its estimated duration, and how long all will take."""
    from rich.table import Table

    from benchctl.cli.screen import wide_console
    from benchctl.profile.plan import arms, plan_runs, variant_settings
    from benchctl.records.directory import arm_label, cell_name
    from benchctl.sim.estimate import estimated_run_s

    arrival = profile.workload.arrival
    durations_s = {
        arm_label(variant, cell): estimated_run_s(variant_settings(profile, variant, cell), requests, arrival)
        for variant, cell in arms(profile)
    }
    table = Table("run", "block", "position", "variant", "cell", "estimated s", box=None)
    total_s = 0.0
    plan = plan_runs(profile)
    for planned in plan.runs:
        duration_s = durations_s[arm_label(planned.variant, planned.cell)]
        total_s += duration_s
        place = str(planned.block), str(planned.position)
        table.add_row(planned.run_id, *place, planned.variant, cell_name(planned.cell), f"{duration_s:.1f}")
    wide_console().print(table)
    print(
        f"{len(plan.runs)} runs in {profile.blocks} blocks of {len(durations_s)}, {len(requests)} requests each; "
        f"estimated duration {total_s:.0f} s"
    )
