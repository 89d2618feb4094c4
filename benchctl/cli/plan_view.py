"""``benchctl run --dry-run``: the ordered runs, and how long they will take."""

from typing import TYPE_CHECKING

from benchctl.units import s_from_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.profile.model import Profile, VariantSettings
    from benchctl.records.run import Cell, PreparedRequest
    from benchctl.sim.request import Request

OVERHEAD_S = 0.6
"""Starting, warming up and stopping one simulated server, beyond its configured delay."""


def print_plan(profile: "Profile", requests: "Sequence[PreparedRequest]") -> None:
    """Print every run in order, the arms, and an estimated duration where the engine allows one."""
    from rich.console import Console
    from rich.table import Table

    from benchctl.profile.plan import arms, plan_runs
    from benchctl.records.directory import cell_name

    durations = {
        arm_name(variant, cell): _estimated_s(profile, variant, cell, requests) for variant, cell in arms(profile)
    }
    table = Table("run", "block", "position", "variant", "cell", "estimated s", box=None)
    plan = plan_runs(profile)
    for planned in plan.runs:
        estimate = durations[arm_name(planned.variant, planned.cell)]
        table.add_row(
            planned.run_id,
            str(planned.block),
            str(planned.position),
            planned.variant,
            cell_name(planned.cell),
            f"{estimate:.1f}",
        )
    Console(highlight=False, soft_wrap=True, width=200).print(table)
    total_s = sum(durations[arm_name(planned.variant, planned.cell)] for planned in plan.runs)
    print(
        f"{len(plan.runs)} runs in {profile.blocks} blocks of {len(durations)}, {len(requests)} requests each; "
        f"estimated duration {total_s:.0f} s"
    )


def arm_name(variant: str, cell: "Cell") -> str:
    """A key for a variant in a cell."""
    return f"{variant} {sorted(cell.items())}"


def _estimated_s(profile: "Profile", variant: str, cell: "Cell", requests: "Sequence[PreparedRequest]") -> float:
    """Wall time of one run: the load simulated in virtual time, and what a run takes beside it."""
    from benchctl.profile.plan import variant_settings

    settings = variant_settings(profile, variant, cell)
    simulated_s = s_from_ns(_makespan_ns(profile, settings, requests)) / settings.server.time_scale
    return simulated_s + OVERHEAD_S + settings.server.start_delay_s


def _makespan_ns(profile: "Profile", settings: "VariantSettings", requests: "Sequence[PreparedRequest]") -> int:
    """From the first arrival to the last step's end, without noise."""
    import msgspec

    from benchctl.engines import engine_for
    from benchctl.sim.config import SimConfig
    from benchctl.sim.openai_api import ChatBody, CompletionBody, request_from
    from benchctl.sim.simulate import SimLoad, simulate

    options = settings.server.model_dump(exclude={"port", "noise", "start_delay_s"})
    config = SimConfig(model=settings.model, noise="none", **options)
    engine = engine_for(profile.engine.kind)

    def parsed(request: "PreparedRequest") -> "Request":
        kind: type[ChatBody | CompletionBody] = ChatBody if request.messages is not None else CompletionBody
        body: ChatBody | CompletionBody = msgspec.json.decode(
            engine.request_call(request, settings).body, type=kind
        )
        return request_from(body, request.request_id, config)

    load = SimLoad(
        requests=tuple(parsed(request) for request in requests),
        arrival_ns=tuple(request.arrival_ns for request in requests),
        max_concurrency=profile.workload.arrival.max_concurrency,
    )
    return simulate(config, [load]).makespan_ns()
