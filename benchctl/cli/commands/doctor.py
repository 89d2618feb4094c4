"""``benchctl doctor``: check this machine, with a remedy for each problem."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from benchctl.cli.options.experiment import RESULTS, Overrides
from benchctl.cli.output.screen import print_json
from benchctl.errors import UsageError
from benchctl.formats import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.measure.doctor.check import Check
    from benchctl.measure.doctor.engines import NeededEngine
    from benchctl.profile.model import Profile

_MISSING: Final = 2
_STYLES: Final = {"ok": "green", "warning": "yellow", "missing": "red"}
_ANY_PROFILE: Final = "ci-smoke"
"""An engine preset is read as part of a profile; this one serves every engine."""


def doctor(
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="Engine preset or kind that must be installed; repeat as needed."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            help="Profile whose memory is checked, on the engine that is named first: value models, KV cache.",
        ),
    ] = None,
    overrides: Overrides = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Require a GPU.")] = False,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", help="Directory for results, whose free space is checked.")
    ] = RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> None:
    """Check this machine: processor, clock, disk space, GPUs, measured peaks, memory, engines, datasets, Slurm.

    Each problem is followed by the command that fixes it. Exit code: 0 if everything that is needed is available
    (without options, what the simulator needs), 2 if something needed is missing. Warnings do not change it.
    """
    from benchctl.cluster.slots_check import slots_check
    from benchctl.cluster.slurm.missing import slurm_checks
    from benchctl.measure.doctor.check import obstacles
    from benchctl.measure.doctor.doctor import Needs, inspect_machine

    engines = [_engine(name) for name in engine or ()]
    planned = _profile(profile, engine or [], overrides or [])
    needs = Needs(results=output_dir, engines=engines, gpu=gpu, profile=planned)
    checks = (*inspect_machine(needs), slots_check(), *slurm_checks())
    if as_json:
        print_json(_document(checks))
    else:
        _print_table(checks)
    if obstacles(checks):
        raise typer.Exit(_MISSING)


def _engine(name: str) -> "NeededEngine":
    """A preset or kind with the options of a measurement. Raises UsageError for an unknown one."""
    from benchctl.engines.engine import engine_for
    from benchctl.measure.doctor.engines import NeededEngine
    from benchctl.profile.load import load_profile
    from benchctl.profile.planning.plan import arms, variant_settings

    if name == "attach":
        raise UsageError("--engine attach: nothing needs to be installed for a server that someone else runs")
    profile = load_profile(_ANY_PROFILE, engine=name)
    engine_for(profile.engine.kind)
    variant, cell = next(iter(arms(profile)))
    return NeededEngine(kind=profile.engine.kind, options=variant_settings(profile, variant, cell).server)


def _profile(name: str | None, engines: list[str], overrides: list[str]) -> "Profile | None":
    """The profile whose memory is checked, on the first of these engines."""
    from benchctl.profile.load import load_profile

    if name is None:
        if overrides:
            raise UsageError("--set changes a profile: name it with --profile, as in --profile topk-sweep")
        return None
    return load_profile(name, engine=engines[0] if engines else None, overrides=overrides)


def _document(checks: "Sequence[Check]") -> dict[str, Any]:
    names = ("topic", "name", "state", "is_needed", "finding", "remedy")
    return {
        "is_ready": not any(check.is_obstacle for check in checks),
        "checks": [
            {name: getattr(check, name) for name in names} | {"facts": dict(check.facts)} for check in checks
        ],
    }


def _print_table(checks: "Sequence[Check]") -> None:
    from rich.table import Table
    from rich.text import Text

    from benchctl.cli.output.screen import wide_console

    table = Table(box=None, pad_edge=False)
    for column in ("topic", "part", "state", "finding"):
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
        return f"not ready: {', '.join(missing)} missing; see the lines that begin with →"
    count = sum(check.state == "warning" for check in checks)
    return f"ready; {count_of(count, 'warning')}" if count else "ready"
