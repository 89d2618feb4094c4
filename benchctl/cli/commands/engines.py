"""``benchctl engines``: install engines, each into an environment of its own, and list them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchctl.cli.output.screen import print_json

if TYPE_CHECKING:
    from benchctl.measure.doctor.check import Check

app = typer.Typer(help="Install engines, each into an environment of its own, and list them.", no_args_is_help=True)


def _complete_installable(incomplete: str) -> list[str]:
    from benchctl.engines.installing.recipes import INSTALLABLE

    return [kind for kind in INSTALLABLE if kind.startswith(incomplete)]


_Kinds = Annotated[
    list[str],
    typer.Argument(
        metavar="ENGINE...",
        help="transformers, vllm, llamacpp or sglang.",
        autocompletion=_complete_installable,
    ),
]
_Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda",
        help="Build for this kind of device; by default $BENCHCTL_ENGINES_DEVICE, or what this machine has.",
    ),
]
_Python = Annotated[
    Path | None,
    typer.Option(
        "--python", metavar="FILE", help="Interpreter for the environment; by default the one that runs benchctl."
    ),
]
_Force = Annotated[bool, typer.Option("--force", help="Install again what is installed.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, for CI.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")]


@app.command("install")
def install(
    kinds: _Kinds, device: _Device = None, python: _Python = None, force: _Force = False, quiet: _Quiet = False
) -> None:
    """Install engines with pip, each into an environment of its own in the user's cache directory.

    BENCHCTL_ENGINES_DIR names another directory. What is installed in the right version is left as it is, at once.
    Which build of torch pip takes (CPU or CUDA) is set by pip's own variables, such as PIP_EXTRA_INDEX_URL.
    """
    from benchctl.cli.output.phases import phase_progress
    from benchctl.engines.installing.install import install_engine
    from benchctl.engines.installing.recipes import device_here, recipe_for

    of_device = device_here(device)
    for recipe in [recipe_for(kind, of_device) for kind in dict.fromkeys(kinds)]:
        with phase_progress(recipe.kind, is_quiet=quiet) as progress:
            install_engine(recipe, progress.announce, on_progress=progress.show, python=python, is_forced=force)


@app.command("list")
def list_engines(as_json: _AsJson = False) -> None:
    """List the engines with version and place of what is installed, and the command that installs the rest."""
    from benchctl.engines.environment import engines_directory
    from benchctl.engines.installing.recipes import device_here
    from benchctl.measure.doctor.engines import engine_checks

    checks = engine_checks((), has_gpu=device_here() == "cuda")
    if as_json:
        print_json({"directory": str(engines_directory()), "engines": [_document(check) for check in checks]})
        return
    _print_table(checks)
    print(f"directory: {engines_directory()} (set BENCHCTL_ENGINES_DIR for another)")


def _document(check: "Check") -> dict[str, Any]:
    is_installed = not check.is_missing
    return {"name": check.name, "is_installed": is_installed, "finding": check.finding, "remedy": check.remedy}


def _print_table(checks: "tuple[Check, ...]") -> None:
    from rich.table import Table

    from benchctl.cli.output.screen import wide_console

    table = Table(box=None, pad_edge=False)
    for column in ("engine", "installed", "to install"):
        table.add_column(column, no_wrap=True)
    for check in checks:
        table.add_row(check.name, check.finding, check.remedy or "")
    wide_console().print(table)
