"""``benchctl init``: write a first profile, from options or from answers at a terminal.

``benchctl doctor``: check this machine, with a remedy for each problem.
``benchctl engines``: install engines, each into an environment of its own, and list them.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from benchctl.cli.commands.profiles import check_names
from benchctl.cli.options.options import RESULTS, Overrides, complete_engine
from benchctl.cli.screen import phase_progress, print_json, wide_console
from benchctl.cluster.slots_check import slots_check
from benchctl.cluster.slurm.missing import slurm_checks
from benchctl.engines.engine import engine_for
from benchctl.engines.environment import engines_directory
from benchctl.engines.installing.install import install_engine
from benchctl.engines.installing.recipes import INSTALLABLE, device_here, recipe_for
from benchctl.errors import EngineUnavailableError, UsageError
from benchctl.formats import count_of
from benchctl.measure.doctor.check import Check, obstacles
from benchctl.measure.doctor.doctor import Needs, inspect_machine
from benchctl.measure.doctor.engines import NeededEngine, engine_checks
from benchctl.profile.init import VALUES, Change, NewProfile, check_name, new_profile
from benchctl.profile.load import load_profile, parse_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.report.table import table_of

_QUESTIONS: Final = {
    "flag": "an option or flag of the server",
    "build": "the build of the engine: two interpreters or programs",
    "sampler": "sampling, or other fields of requests",
    "model": "the model",
    "server": "nothing here: two servers that run already",
}
"""Kinds of change, as ``profile.new_profile.Change`` has them, in the words of the question."""
_EXAMPLES: Final = {"flag": "max_num_seqs=4", "sampler": "top_k=50"}
_SIMULATED_MODEL: Final = "qwen2.5-7b"
_OTHER_SIMULATED_MODEL: Final = "qwen2.5-1.5b"
_INSTALLABLE: Final = ("vllm", "transformers", "llamacpp")
"""Engines in the order in which an installed one is chosen."""


_Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name of the profile, written to NAME.yaml.")]
_ChangeOption = Annotated[
    str | None,
    typer.Option(
        "--change",
        metavar="|".join(_QUESTIONS),
        help="What changes: an option or flag of the server, its build, fields of requests, the model, the server.",
        autocompletion=lambda incomplete: [name for name in _QUESTIONS if name.startswith(incomplete)],
    ),
]
_Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="Engine preset or kind; by default one that is installed here, else the simulator. With --change "
        "server, the dialect of the servers.",
        autocompletion=complete_engine,
    ),
]
_Model = Annotated[
    str | None, typer.Option("--model", help="Model: a directory, or a name that the engine can load.")
]
_Value = Annotated[
    list[str] | None,
    typer.Option(
        "--value",
        metavar="VALUE",
        help="What it changes to: OPTION=VALUE or a flag; a path of each build; FIELD=VALUE; the other model; the "
        "address of each server. Repeat as needed.",
    ),
]
_Force = Annotated[bool, typer.Option("--force", help="Replace NAME.yaml if it exists.")]


def init(
    name: _Name = None,
    change: _ChangeOption = None,
    engine: _Engine = None,
    model: _Model = None,
    value: _Value = None,
    force: _Force = False,
) -> None:
    """Write a profile that measures one change, and print the command that runs it.

    At a terminal, what the options leave open is asked. Example: benchctl init mine --change flag --engine sim
    --value max_num_seqs=4
    """
    try:
        new = _answered(name, change, engine, model, tuple(value or ()))
    except typer.Abort:
        raise KeyboardInterrupt from None
    path = Path(f"{new.name}.yaml")
    if path.exists() and not force:
        raise UsageError(f"{path} exists; choose another name, or replace it with --force")
    _write(path, new)
    print(f"{path}: {_summary(new)}")
    print("edit it, or leave it as it is, then run it:")
    print(f"  {shlex.join(['benchctl', 'run', str(path)])}")


def _answered(
    name: str | None, change: str | None, engine: str | None, model: str | None, values: tuple[str, ...]
) -> NewProfile:
    """The profile that options and, at a terminal, answers describe.

    Raises UsageError that names every option that is missing.
    """
    if change is not None and change not in _QUESTIONS:
        raise UsageError(f"--change is {change!r}; choose one of {', '.join(_QUESTIONS)}")
    if name is not None:
        name = check_name(name)
    is_asked = sys.stdin.isatty() and sys.stdout.isatty()
    if not is_asked:
        _refuse_missing(change, engine, model, values)
    kind_of_change = Change(change or _ask_change())
    chosen = engine or _ask_engine(kind_of_change, is_asked=is_asked)
    chosen_kind = _kind_of(chosen, kind_of_change)
    if model is None and kind_of_change is not Change.SERVER:
        model = _model(chosen, chosen_kind, is_asked=is_asked)
    return NewProfile(
        name=name
        or (check_name(typer.prompt("Name", f"my-{kind_of_change}")) if is_asked else f"my-{kind_of_change}"),
        change=kind_of_change,
        engine=chosen,
        kind=chosen_kind,
        model=model,
        values=values or _ask_values(kind_of_change, chosen_kind),
    )


def _refuse_missing(change: str | None, engine: str | None, model: str | None, values: tuple[str, ...]) -> None:

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


_SIMULATORS: Final = ("sim", "sim-exact")


def _ask_change() -> str:
    print("What changes?")
    for number, (kind, meaning) in enumerate(_QUESTIONS.items(), start=1):
        print(f"  {number}  {kind:8} {meaning}")
    by_number = dict(zip("12345", _QUESTIONS, strict=True))
    return _ask("Number or word", "1", lambda answer: by_number.get(answer, answer), _QUESTIONS)


def _ask(question: str, default: str, meaning: Callable[[str], str], choices: dict[str, str]) -> str:
    while True:
        answer = meaning(typer.prompt(question, default).strip())
        if answer in choices:
            return answer
        print(f"{answer!r} is none of {', '.join(choices)}")


def _ask_engine(change: Change, *, is_asked: bool) -> str:
    if change == "server":
        return typer.prompt("Dialect of the servers (openai, vllm, sglang, …)", "openai") if is_asked else "openai"
    engine = installed_engine()
    return typer.prompt("Engine ('benchctl engines list' shows all)", engine) if is_asked else engine


def installed_engine() -> str:
    """The preset of an engine that is installed here, in the order of ``_INSTALLABLE``; else the simulator."""
    for kind in _INSTALLABLE:
        try:
            engine_for(kind).installation(None)
        except EngineUnavailableError:
            continue
        return kind if kind == "vllm" and device_here() == "cuda" else f"{kind}-cpu"
    return "sim"


def _kind_of(engine: str, change: Change) -> str:
    """The kind of a preset or kind. Raises ProfileError for an unknown name."""
    if change == "server":
        return "attach"
    kind: str = load_profile("ci-smoke", engine=engine).engine.kind
    return kind


def _model(engine: str, kind: str, *, is_asked: bool) -> str:
    if kind == "sim":
        return typer.prompt("Model", _SIMULATED_MODEL) if is_asked else _SIMULATED_MODEL
    print(f"A model that {engine} can load; without one: benchctl models make-tiny models/tiny --gguf")
    return str(typer.prompt("Model (directory or name)"))


def _ask_values(change: Change, kind: str) -> tuple[str, ...]:

    if change == "build":
        return (typer.prompt("Old build (interpreter or program)"), typer.prompt("New build"))
    if change == "server":
        return (typer.prompt("Address of the baseline"), typer.prompt("Address of the server to judge"))
    example = _EXAMPLES.get(change, _OTHER_SIMULATED_MODEL if kind == "sim" else None)
    return (typer.prompt(VALUES[change][0].upper() + VALUES[change][1:], example),)


def _write(path: Path, new: NewProfile) -> None:
    """Write the profile once it has proven to be one. Raises ProfileError otherwise, and leaves no file."""
    text = new_profile(new)
    check_names(parse_profile(f"{text}name: {new.name}\n", str(path)))
    path.write_text(text, encoding="utf-8")


def _summary(new: NewProfile) -> str:
    if new.change == "server":
        return "two running servers, 6 blocks"
    return f"{_QUESTIONS[new.change].partition(':')[0]} against a baseline, 6 blocks, engine {new.engine}"


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


def _engine(name: str) -> NeededEngine:
    """A preset or kind with the options of a measurement. Raises UsageError for an unknown one."""
    if name == "attach":
        raise UsageError("--engine attach: nothing needs to be installed for a server that someone else runs")
    profile = load_profile(_ANY_PROFILE, engine=name)
    engine_for(profile.engine.kind)
    variant, cell = next(iter(arms(profile)))
    return NeededEngine(kind=profile.engine.kind, options=variant_settings(profile, variant, cell).server)


def _profile(name: str | None, engines: list[str], overrides: list[str]) -> Profile | None:
    """The profile whose memory is checked, on the first of these engines."""
    if name is None:
        if overrides:
            raise UsageError("--set changes a profile: name it with --profile, as in --profile topk-sweep")
        return None
    return load_profile(name, engine=engines[0] if engines else None, overrides=overrides)


def _document(checks: Sequence[Check]) -> dict[str, Any]:
    names = ("topic", "name", "state", "is_needed", "finding", "remedy")
    return {
        "is_ready": not any(check.is_obstacle for check in checks),
        "checks": [
            {name: getattr(check, name) for name in names} | {"facts": dict(check.facts)} for check in checks
        ],
    }


def _print_table(checks: Sequence[Check]) -> None:

    headings = ("topic", "part", "state", "finding")
    rows: list[tuple[str, ...]] = []
    topic = None
    for check in checks:
        rows.append((check.topic if check.topic != topic else "", check.name, check.state, check.finding))
        topic = check.topic
        if check.remedy is not None:
            rows.append(("", "", "", f"→ {check.remedy}"))
    console = wide_console()
    table = table_of(headings, rows, left=headings)
    console.print(table.drawn(lambda text: Text(text, style=_STYLES.get(text, ""))))
    console.print()
    console.print(_doctor_summary(checks))


def _doctor_summary(checks: Sequence[Check]) -> str:
    missing = [f"{check.topic} {check.name}" for check in checks if check.is_obstacle]
    if missing:
        return f"not ready: {', '.join(missing)} missing; see the lines that begin with →"
    count = sum(check.state == "warning" for check in checks)
    return f"ready; {count_of(count, 'warning')}" if count else "ready"


app = typer.Typer(
    add_completion=False,
    help="Install engines, each into an environment of its own, and list them.",
    no_args_is_help=True,
)


def _complete_installable(incomplete: str) -> list[str]:

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
_EnginesForce = Annotated[bool, typer.Option("--force", help="Install again what is installed.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, for CI.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")]


@app.command("install")
def install(
    kinds: _Kinds,
    device: _Device = None,
    python: _Python = None,
    force: _EnginesForce = False,
    quiet: _Quiet = False,
) -> None:
    """Install engines with pip, each into an environment of its own in the user's cache directory.

    BENCHCTL_ENGINES_DIR names another directory. What is installed in the right version is left as it is, at once.
    Which build of torch pip takes (CPU or CUDA) is set by pip's own variables, such as PIP_EXTRA_INDEX_URL.
    """
    of_device = device_here(device)
    for recipe in [recipe_for(kind, of_device) for kind in dict.fromkeys(kinds)]:
        with phase_progress(recipe.kind, is_quiet=quiet) as progress:
            install_engine(recipe, progress.announce, on_progress=progress.show, python=python, is_forced=force)


@app.command("list")
def list_engines(as_json: _AsJson = False) -> None:
    """List the engines with version and place of what is installed, and the command that installs the rest."""
    checks = engine_checks((), has_gpu=device_here() == "cuda")
    if as_json:
        print_json(
            {"directory": str(engines_directory()), "engines": [_engines_document(check) for check in checks]}
        )
        return
    _engines_print_table(checks)
    print(f"directory: {engines_directory()} (set BENCHCTL_ENGINES_DIR for another)")


def _engines_document(check: Check) -> dict[str, Any]:
    is_installed = not check.is_missing
    return {"name": check.name, "is_installed": is_installed, "finding": check.finding, "remedy": check.remedy}


def _engines_print_table(checks: tuple[Check, ...]) -> None:

    headings = ("engine", "installed", "to install")
    rows = ((check.name, check.finding, check.remedy or "") for check in checks)
    wide_console().print(table_of(headings, rows, left=headings))
