"""``benchctl profiles``: list, show and validate profiles."""

from typing import Annotated

import typer
from rich.text import Text

from benchctl.analysis.compare.compare import deciding_metrics
from benchctl.cli.options.options import EnginePreset, complete_profile
from benchctl.cli.screen import folding_console
from benchctl.costs.hardware import hardware_for
from benchctl.errors import ProfileError, UsageError
from benchctl.formats import count_of
from benchctl.profile.files import display_path, grouped_profiles, preset_files
from benchctl.profile.load import dump_profile, load_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import plan_runs
from benchctl.report.table import table_of

app = typer.Typer(add_completion=False, no_args_is_help=True, help="List, show and validate profiles.")

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change one key, such as workload.num_prompts=3; repeat as needed."
    ),
]


@app.command("list")
def list_known() -> None:
    """List the profiles and engine presets that can be used by name."""
    headings = ("profile", "description", "file")
    groups = grouped_profiles()
    rows: list[tuple[str, ...]] = []
    for group, entries in groups.items():
        rows.append((group,))
        rows += [(f"  {entry.name}", entry.description, display_path(entry.path)) for entry in entries]
    console = folding_console()
    table = table_of(headings, rows, left=headings)
    console.print(table.drawn(lambda text: Text(text, style="bold" if text in groups else ""), folds=True))
    console.print(f"engine presets: {', '.join(preset_files())}", soft_wrap=True)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name or path of a profile.", autocompletion=complete_profile)],
    engine: EnginePreset = None,
    overrides: SetOption = None,
) -> None:
    """Print a complete profile as YAML, with inherited values and defaults."""
    print(dump_profile(load_profile(name, engine=engine, overrides=overrides or ())), end="")


@app.command("validate")
def validate(
    names: Annotated[
        list[str],
        typer.Argument(help="Names or paths of profiles.", metavar="NAME...", autocompletion=complete_profile),
    ],
    engine: EnginePreset = None,
    overrides: SetOption = None,
) -> None:
    """Check profiles and report every error with its line. Exit code: 2 with errors, else 0."""
    errors: list[str] = []
    for name in names:
        try:
            profile = load_profile(name, engine=engine, overrides=overrides or [])
            check_names(profile)
            num_runs = len(plan_runs(profile).runs)
            plan = f"{count_of(num_runs, 'run')} in {count_of(profile.blocks, 'block')}"
            print(f"ok {name}: {plan} on {profile.engine.kind}")
        except ProfileError as error:
            errors.append(str(error))
    if errors:
        raise ProfileError("\n".join(errors))


def check_names(profile: Profile) -> None:
    """Check the names that only the analysis needs, before anything is measured."""
    for key, look_up in (
        ("primary_metrics", lambda: deciding_metrics(profile.primary_metrics)),
        ("hardware", lambda: hardware_for(profile.hardware)),
    ):
        try:
            look_up()
        except UsageError as error:
            raise ProfileError(f"profile {profile.name}: {key}: {error}") from error
