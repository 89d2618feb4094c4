"""``benchctl profiles``: list, show and validate profiles. What checks them is imported where that is done."""

from typing import Annotated

import typer
from rich.text import Text

from benchctl.cli.options import EnginePreset, Overrides, check_names, complete_profile
from benchctl.cli.screen import say, text_console
from benchctl.errors import ProfileError
from benchctl.profile.files import display_path, grouped_profiles, preset_files
from benchctl.report.table import table_of
from benchctl.units import count_of

app = typer.Typer(add_completion=False, no_args_is_help=True, help="List, show and validate profiles.")


@app.command("list")
def list_known() -> None:
    """List the profiles and engine presets that can be used by name."""
    headings = ("profile", "description", "file")
    groups = grouped_profiles()
    rows: list[tuple[str, ...]] = []
    for group, entries in groups.items():
        rows.append((group,))
        rows += [(f"  {entry.name}", entry.description, display_path(entry.path)) for entry in entries]
    console = text_console()
    table = table_of(headings, rows, left=headings, extra=("file",))
    console.print(table.drawn(console.width, lambda text: Text(text, style="bold" if text in groups else "")))
    console.print(f"engine presets: {', '.join(preset_files())}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name or path of a profile.", autocompletion=complete_profile)],
    engine: EnginePreset = None,
    overrides: Overrides = None,
) -> None:
    """Print a complete profile as YAML, with inherited values and defaults."""
    from benchctl.profile.load import dump_profile, load_profile

    print(dump_profile(load_profile(name, engine=engine, overrides=overrides or ())), end="")


@app.command("validate")
def validate(
    names: Annotated[
        list[str],
        typer.Argument(help="Names or paths of profiles.", metavar="NAME...", autocompletion=complete_profile),
    ],
    engine: EnginePreset = None,
    overrides: Overrides = None,
) -> None:
    """Check profiles and report every error with its line. Exit code: 2 with errors, else 0."""
    from benchctl.profile.load import load_profile
    from benchctl.profile.planning import plan_runs

    errors: list[str] = []
    for name in names:
        try:
            profile = load_profile(name, engine=engine, overrides=overrides or [])
            check_names(profile)
            plan = f"{count_of(len(plan_runs(profile).runs), 'run')} in {count_of(profile.blocks, 'block')}"
            say(f"ok {name}: {plan} on {profile.engine.kind}")
        except ProfileError as error:
            errors.append(str(error))
    if errors:
        raise ProfileError("\n".join(errors))
