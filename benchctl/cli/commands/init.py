"""``benchctl init``: write a first profile, from options or from answers at a terminal."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from benchctl.cli.options.completion import complete_engine
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchctl.profile.new_profile import Change, NewProfile

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
) -> "NewProfile":
    """The profile that options and, at a terminal, answers describe.

    Raises UsageError that names every option that is missing.
    """
    from benchctl.profile.new_profile import Change, NewProfile, check_name

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
    from benchctl.profile.new_profile import VALUES, Change

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


def _ask(question: str, default: str, meaning: "Callable[[str], str]", choices: "dict[str, str]") -> str:
    while True:
        answer = meaning(typer.prompt(question, default).strip())
        if answer in choices:
            return answer
        print(f"{answer!r} is none of {', '.join(choices)}")


def _ask_engine(change: "Change", *, is_asked: bool) -> str:
    if change == "server":
        return typer.prompt("Dialect of the servers (openai, vllm, sglang, …)", "openai") if is_asked else "openai"
    engine = installed_engine()
    return typer.prompt("Engine ('benchctl engines list' shows all)", engine) if is_asked else engine


def installed_engine() -> str:
    """The preset of an engine that is installed here, in the order of ``_INSTALLABLE``; else the simulator."""
    from benchctl.engines.engine import engine_for
    from benchctl.engines.installing.recipes import device_here
    from benchctl.errors import EngineUnavailableError

    for kind in _INSTALLABLE:
        try:
            engine_for(kind).installation(None)
        except EngineUnavailableError:
            continue
        return kind if kind == "vllm" and device_here() == "cuda" else f"{kind}-cpu"
    return "sim"


def _kind_of(engine: str, change: "Change") -> str:
    """The kind of a preset or kind. Raises ProfileError for an unknown name."""
    from benchctl.profile.load import load_profile

    if change == "server":
        return "attach"
    kind: str = load_profile("ci-smoke", engine=engine).engine.kind
    return kind


def _model(engine: str, kind: str, *, is_asked: bool) -> str:
    if kind == "sim":
        return typer.prompt("Model", _SIMULATED_MODEL) if is_asked else _SIMULATED_MODEL
    print(f"A model that {engine} can load; without one: benchctl models make-tiny models/tiny --gguf")
    return str(typer.prompt("Model (directory or name)"))


def _ask_values(change: "Change", kind: str) -> tuple[str, ...]:
    from benchctl.profile.new_profile import VALUES

    if change == "build":
        return (typer.prompt("Old build (interpreter or program)"), typer.prompt("New build"))
    if change == "server":
        return (typer.prompt("Address of the baseline"), typer.prompt("Address of the server to judge"))
    example = _EXAMPLES.get(change, _OTHER_SIMULATED_MODEL if kind == "sim" else None)
    return (typer.prompt(VALUES[change][0].upper() + VALUES[change][1:], example),)


def _write(path: Path, new: "NewProfile") -> None:
    """Write the profile once it has proven to be one. Raises ProfileError otherwise, and leaves no file."""
    from benchctl.cli.commands.profiles import check_names
    from benchctl.profile.load import parse_profile
    from benchctl.profile.new_profile import new_profile

    text = new_profile(new)
    check_names(parse_profile(f"{text}name: {new.name}\n", str(path)))
    path.write_text(text, encoding="utf-8")


def _summary(new: "NewProfile") -> str:
    if new.change == "server":
        return "two running servers, 6 blocks"
    return f"{_QUESTIONS[new.change].partition(':')[0]} against a baseline, 6 blocks, engine {new.engine}"
