"""``benchctl doctor``: is this machine ready to measure, and what brings what is missing?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from benchctl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.measure.doctor.check import Check
    from benchctl.measure.doctor.engines import WantedEngine

_MISSING: Final = 2
_STYLES: Final = {"ok": "green", "warning": "yellow", "missing": "red"}
_ANY_PROFILE: Final = "ci-smoke"
"""An engine preset is read as part of a profile; this one serves every engine."""


def doctor(
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="An engine preset or kind that must be installed; repeat as needed."),
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="A GPU must be there.")] = False,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Where results will go: is there room?")
    ] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")] = False,
) -> None:
    """Look at this machine: processor, clock, room, GPUs, engines, data sets; say what brings what is missing.

    Exit code: 0 when all that is needed is there (without options, what the simulator needs), 2 when something
    needed is missing. Warnings change nothing.
    """
    from benchctl.measure.doctor.check import obstacles
    from benchctl.measure.doctor.doctor import Wanted, look_at_machine

    wanted = Wanted(results=output_dir, engines=[_engine(name) for name in engine or ()], gpu=gpu)
    checks = look_at_machine(wanted)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(_document(checks)), indent=1).decode())
    else:
        _print_table(checks)
    if obstacles(checks):
        raise typer.Exit(_MISSING)


def _engine(name: str) -> "WantedEngine":
    """A preset or kind as it would be measured. Raises UsageError for an unknown one."""
    from benchctl.engines.kinds import engine_for
    from benchctl.measure.doctor.engines import WantedEngine
    from benchctl.profile.load import load_profile
    from benchctl.profile.planning.plan import arms, variant_settings

    if name == "attach":
        raise UsageError("--engine attach: nothing needs to be installed for a server that someone else runs")
    profile = load_profile(_ANY_PROFILE, engine=name)
    engine_for(profile.engine.kind)
    variant, cell = next(iter(arms(profile)))
    return WantedEngine(kind=profile.engine.kind, options=variant_settings(profile, variant, cell).server)


def _document(checks: "Sequence[Check]") -> dict[str, Any]:
    return {
        "is_ready": not any(check.is_obstacle for check in checks),
        "checks": [
            {
                "topic": check.topic,
                "name": check.name,
                "state": check.state,
                "is_needed": check.is_needed,
                "finding": check.finding,
                "remedy": check.remedy,
                "facts": dict(check.facts),
            }
            for check in checks
        ],
    }


def _print_table(checks: "Sequence[Check]") -> None:
    from rich.table import Table
    from rich.text import Text

    from benchctl.cli.screen import wide_console

    table = Table(box=None, pad_edge=False)
    for column in ("topic", "what", "state", "finding"):
        table.add_column(column, no_wrap=True)
    topic = None
    for check in checks:
        shown_topic = check.topic if check.topic != topic else ""
        topic = check.topic
        table.add_row(shown_topic, check.name, Text(check.state, style=_STYLES[check.state]), check.finding)
        if check.remedy is not None:
            table.add_row("", "", "", f"→ {check.remedy}")
    console = wide_console()
    console.print(table)
    console.print()
    console.print(_summary(checks))


def _summary(checks: "Sequence[Check]") -> str:
    missing = [f"{check.topic} {check.name}" for check in checks if check.is_obstacle]
    if missing:
        return f"not ready: {', '.join(missing)} missing; → says what brings it"
    count = sum(check.state == "warning" for check in checks)
    doubts = f"; {count} warning{'s' if count != 1 else ''}" if count else ""
    return f"ready{doubts}"
