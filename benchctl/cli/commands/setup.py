"""``benchctl init``: write a first profile, from options or from answers at a terminal.

``benchctl doctor``: check this machine, with a remedy for each problem.
``benchctl engines``: install engines, each into an environment of its own, and list them.
``benchctl profiles``: list, show and validate profiles.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Group
from rich.text import Text

from benchctl.cli.options import (
    RESULTS,
    AsJson,
    EnginePreset,
    Overrides,
    check_names,
    complete_engine,
    complete_profile,
)
from benchctl.cli.screen import folding_console, tell
from benchctl.cluster.slurm import slurm_check
from benchctl.engines.engine import engine_for
from benchctl.engines.environment import INSTALLABLE, device_here, engines_directory, install_engine, recipe_for
from benchctl.errors import EngineUnavailableError, ProfileError, UsageError
from benchctl.measure.doctor.check import Check
from benchctl.measure.doctor.machine import engine_checks, inspect_machine
from benchctl.profile.engine_options import ServerOptions
from benchctl.profile.engine_table import ENGINES, PLAIN_DIALECT, is_virtual
from benchctl.profile.files import display_path, grouped_profiles, preset_files
from benchctl.profile.init import VALUES, Change, NewProfile, Prompts, check_name, new_profile
from benchctl.profile.load import dump_profile, load_profile, parse_profile
from benchctl.profile.planning import arms, plan_runs, variant_settings
from benchctl.report.table import table_of
from benchctl.units import count_of
from benchctl.workload.datasets.own import own_rows

_QUESTIONS: Final = {
    "flag": "an option or flag of the server",
    "build": "the build of the engine: two interpreters or programs",
    "sampler": "sampling, or other fields of requests",
    "model": "the model",
    "server": "nothing here: two servers that run already",
}
"""Kinds of change, as ``profile.init.Change`` has them, in the words of the question."""
_EXAMPLES: Final = {"flag": "max_num_seqs=4", "sampler": "top_k=50"}
_SIMULATED_MODEL: Final = "qwen2.5-7b"
_OTHER_SIMULATED_MODEL: Final = "qwen2.5-1.5b"
_SIMULATORS: Final = ("sim", "sim-exact")
_ANY_PROFILE: Final = "ci-smoke"
"""An engine preset is read as part of a profile; this one serves every engine."""
_MISSING: Final = 2
_STYLES: Final = {"ok": "green", "warning": "yellow", "missing": "red"}

engines = typer.Typer(
    add_completion=False,
    help="Install engines, each into an environment of its own, and list them.",
    no_args_is_help=True,
)
profiles = typer.Typer(add_completion=False, no_args_is_help=True, help="List, show and validate profiles.")


def init(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the profile, written to NAME.yaml.")
    ] = None,
    change: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(_QUESTIONS),
            help="What changes: an option or flag of the server, its build, fields of requests, the model, the "
            "server.",
            autocompletion=lambda incomplete: [name for name in _QUESTIONS if name.startswith(incomplete)],
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Engine preset or kind; by default one that is installed here, else the simulator. With --change "
            "server, the dialect of the servers.",
            autocompletion=complete_engine,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model: a directory, or a name that the engine can load.")
    ] = None,
    value: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VALUE",
            help="What it changes to: OPTION=VALUE or a flag; a path of each build; FIELD=VALUE; the other model; "
            "the address of each server. Several values of one option: OPTION=A,B,C. Repeat as needed.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Address of one running server: fields of its requests change, or without --value nothing.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts of your own, as JSON Lines with prompt or messages."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace NAME.yaml if it exists.")] = False,
) -> None:
    """Write a profile that measures one change, and print the command that runs it.

    At a terminal, what the options leave open is asked. Example: benchctl init mine --change flag --engine sim
    --value max_num_seqs=4
    """
    try:
        new = _answered(name, change, engine, model, tuple(value or ()), url)
    except typer.Abort:
        raise KeyboardInterrupt from None
    path = Path(f"{new.name}.yaml")
    if path.exists() and not force:
        raise UsageError(f"{path} exists; choose another name, or replace it with --force")
    if prompts is not None:
        rows = own_rows(str(prompts))
        has_lengths = all(row.output_len is not None for row in rows)
        own = Prompts(path=str(prompts), num_rows=len(rows), has_output_lengths=has_lengths)
        new = replace(new, prompts=own)
    text = new_profile(new)
    check_names(parse_profile(f"{text}name: {new.name}\n", str(path)))
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {_summary(new)}, 6 blocks")
    print("edit it, or leave it as it is, then run it:")
    print(f"  {shlex.join(['benchctl', 'run', new.name])}")
    if new.change is None:
        parent = RESULTS / new.name
        print("change the server, run it again, then compare the first directory with the second:")
        print(f"  benchctl compare {parent}/FIRST {parent}/SECOND")


def _summary(new: NewProfile) -> str:
    if new.change is None:
        return f"the server at {new.url} as it is"
    if new.change is Change.SERVER:
        return "two running servers"
    where = f"the server at {new.url}" if new.url is not None else f"engine {new.engine}"
    return f"{_QUESTIONS[new.change].partition(':')[0]} against a baseline, {where}"


def _answered(
    name: str | None,
    change: str | None,
    engine: str | None,
    model: str | None,
    values: tuple[str, ...],
    url: str | None,
) -> NewProfile:
    """The profile that options and, at a terminal, answers describe.

    Raises UsageError that names every option that is missing.
    """
    if change is not None and change not in _QUESTIONS:
        raise UsageError(f"--change is {change!r}; choose one of {', '.join(_QUESTIONS)}")
    if name is not None:
        name = check_name(name)
    if url is not None:
        of_url = Change(change) if change is not None else Change.SAMPLER if values else None
        return NewProfile(
            name=name or "my-server",
            change=of_url,
            engine=engine or PLAIN_DIALECT,
            kind="attach",
            model=model,
            values=values,
            url=url,
        )
    is_asked = sys.stdin.isatty() and sys.stdout.isatty()
    if not is_asked:
        _refuse_missing(change, engine, model, values)

    def answer(question: str, default: str | None) -> str:
        return typer.prompt(question, default, type=str) if is_asked or default is None else default

    kind_of_change = Change(change or _ask_change())
    is_server = kind_of_change is Change.SERVER
    if engine is None and is_server:
        engine = answer("Dialect of the servers (openai, vllm, sglang, …)", "openai")
    elif engine is None:
        engine = answer("Engine ('benchctl engines list' shows all)", installed_engine())
    kind = "attach" if is_server else load_profile(_ANY_PROFILE, engine=engine).engine.kind
    if model is None and is_virtual(kind):
        model = answer("Model", _SIMULATED_MODEL)
    elif model is None and not is_server:
        print(f"A model that {engine} can load; without one: benchctl models make-tiny models/tiny --gguf")
        model = answer("Model (directory or name)", None)
    return NewProfile(
        name=name or check_name(answer("Name", f"my-{kind_of_change}")),
        change=kind_of_change,
        engine=engine,
        kind=kind,
        model=model,
        values=values or _ask_values(kind_of_change, kind),
    )


def _refuse_missing(change: str | None, engine: str | None, model: str | None, values: tuple[str, ...]) -> None:
    """Raise UsageError that names the options in place of answers."""
    missing = []
    if change is None:
        missing.append(f"--change {'|'.join(_QUESTIONS)}")
    if not values:
        meaning = VALUES[Change(change)] if change is not None else "what it changes to"
        missing.append(f"--value ({meaning})")
    if model is None and change != "server" and (chosen := engine or installed_engine()) not in _SIMULATORS:
        missing.append(f"--model (for {chosen}: a directory or a name; --engine sim needs none)")
    if missing:
        raise UsageError(f"not at a terminal, where these would be asked: add {', '.join(missing)}")


def _ask_change() -> str:
    print("What changes?")
    for number, (kind, meaning) in enumerate(_QUESTIONS.items(), start=1):
        print(f"  {number}  {kind:8} {meaning}")
    by_number = dict(zip("12345", _QUESTIONS, strict=True))
    while True:
        given: str = typer.prompt("Number or word", "1").strip()
        answer = by_number.get(given, given)
        if answer in _QUESTIONS:
            return answer
        print(f"{answer!r} is none of {', '.join(_QUESTIONS)}")


def installed_engine() -> str:
    """The preset of an engine that is installed here, the preferred first; else the simulator."""
    for kind in INSTALLABLE:
        try:
            engine_for(kind).installation(None)
        except EngineUnavailableError:
            continue
        has_preset = kind in preset_files() and device_here() == "cuda"
        return kind if has_preset else ENGINES[kind].preset_without_gpu or kind
    return "sim"


def _ask_values(change: Change, kind: str) -> tuple[str, ...]:
    questions = {
        Change.BUILD: ("Old build (interpreter or program)", "New build"),
        Change.SERVER: ("Address of the baseline", "Address of the server to judge"),
    }
    if change in questions:
        return tuple(typer.prompt(question) for question in questions[change])
    example = _EXAMPLES.get(change, _OTHER_SIMULATED_MODEL if is_virtual(kind) else None)
    return (typer.prompt(VALUES[change][0].upper() + VALUES[change][1:], example),)


def doctor(
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Engine preset or kind that must be installed; repeat as needed."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Profile whose memory is checked, on the engine that is named first: value models, KV cache.",
        ),
    ] = None,
    overrides: Overrides = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Require a GPU.")] = False,
    output_dir: Annotated[Path, typer.Option(help="Directory for results, whose free space is checked.")] = RESULTS,
    as_json: AsJson = False,
) -> None:
    """Check this machine: processor, clock, disk space, GPUs, measured peaks, memory, engines, datasets, Slurm.

    Each problem is followed by the command that fixes it. Exit code: 0 if everything that is needed is available
    (without options, what the simulator needs), 2 if something needed is missing. Warnings do not change it.
    """
    needed = dict(map(_needed_engine, engine or ()))
    planned = None
    if profile is not None:
        planned = load_profile(profile, engine=engine[0] if engine else None, overrides=overrides or [])
    elif overrides:
        raise UsageError("--set changes a profile: name it with --profile, as in --profile topk-sweep")
    checks = (*inspect_machine(output_dir, needed, planned, needs_gpu=gpu), slurm_check())
    missing = [check for check in checks if check.is_obstacle]
    document = {"is_ready": not missing, "checks": [_document(check) for check in checks]}
    tell(document, *_check_lines(checks, missing), as_json=as_json)
    if missing:
        raise typer.Exit(_MISSING)


def _needed_engine(name: str) -> tuple[str, ServerOptions]:
    """The kind of a preset or kind, and the options of a measurement. Raises UsageError for an unknown one."""
    if name == "attach":
        raise UsageError("--engine attach: nothing needs to be installed for a server that someone else runs")
    profile = load_profile(_ANY_PROFILE, engine=name)
    engine_for(profile.engine.kind)
    variant, cell = next(iter(arms(profile)))
    return profile.engine.kind, variant_settings(profile, variant, cell).server


def _document(check: Check) -> dict[str, Any]:
    names = ("topic", "name", "state", "is_needed", "finding", "remedy")
    return {name: getattr(check, name) for name in names} | {"facts": dict(check.facts)}


def _check_lines(checks: Sequence[Check], missing: Sequence[Check]) -> Iterator[Group | str]:
    """A row for each check, below it its remedy, and what is missing."""
    headings = ("topic", "part", "state", "finding")
    rows: list[tuple[str, ...]] = []
    topic = None
    for check in checks:
        rows.append((check.topic if check.topic != topic else "", check.name, check.state, check.finding))
        topic = check.topic
        if check.remedy is not None:
            rows.append(("", "", "", f"→ {check.remedy}"))
    yield table_of(headings, rows, left=headings).drawn(lambda text: Text(text, style=_STYLES.get(text, "")))
    yield ""
    names = ", ".join(f"{check.topic} {check.name}" for check in missing)
    count = sum(check.state == "warning" for check in checks)
    ready = f"ready; {count_of(count, 'warning')}" if count else "ready"
    yield f"not ready: {names} missing; see the lines that begin with →" if missing else ready


@engines.command("install")
def install(
    kinds: Annotated[
        list[str],
        typer.Argument(
            metavar="ENGINE...",
            help="transformers, vllm, llamacpp or sglang.",
            autocompletion=lambda incomplete: [kind for kind in INSTALLABLE if kind.startswith(incomplete)],
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda",
            help="Build for this kind of device; by default $BENCHCTL_ENGINES_DEVICE, or what this machine has.",
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Interpreter for the environment; by default the one that runs benchctl."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Install again what is installed.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing of pip but its errors, for CI.")] = False,
) -> None:
    """Install engines with pip, each into an environment of its own in the user's cache directory.

    BENCHCTL_ENGINES_DIR names another directory. What is installed in the right version is left as it is, at once.
    Which build of torch pip takes (CPU or CUDA) is set by pip's own variables, such as PIP_EXTRA_INDEX_URL.
    """
    of_device = device_here(device)
    for recipe in [recipe_for(kind, of_device) for kind in dict.fromkeys(kinds)]:
        install_engine(recipe, partial(print, flush=True), python=python, is_forced=force, is_quiet=quiet)


@engines.command("list")
def list_engines(
    as_json: AsJson = False,
) -> None:
    """List the engines with version and place of what is installed, and the command that installs the rest."""
    directory, checks = engines_directory(), engine_checks({}, has_gpu=device_here() == "cuda")
    documents = [
        {
            "name": check.name,
            "is_installed": not check.is_missing,
            "finding": check.finding,
            "remedy": check.remedy,
        }
        for check in checks
    ]
    headings = ("engine", "installed", "to install")
    rows = ((check.name, check.finding, check.remedy or "") for check in checks)
    tell(
        {"directory": str(directory), "engines": documents},
        table_of(headings, rows, left=headings),
        f"directory: {directory} (set BENCHCTL_ENGINES_DIR for another)",
        as_json=as_json,
    )


@profiles.command("list")
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


@profiles.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name or path of a profile.", autocompletion=complete_profile)],
    engine: EnginePreset = None,
    overrides: Overrides = None,
) -> None:
    """Print a complete profile as YAML, with inherited values and defaults."""
    print(dump_profile(load_profile(name, engine=engine, overrides=overrides or ())), end="")


@profiles.command("validate")
def validate(
    names: Annotated[
        list[str],
        typer.Argument(help="Names or paths of profiles.", metavar="NAME...", autocompletion=complete_profile),
    ],
    engine: EnginePreset = None,
    overrides: Overrides = None,
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
