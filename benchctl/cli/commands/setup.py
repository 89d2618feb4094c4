"""``benchctl init``: write a first profile, from options or from answers at a terminal.

``benchctl doctor``: check this machine, with a remedy for each problem.
``benchctl engines``: install engines, each into an environment of its own, and list them.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Group
from rich.text import Text

from benchctl.cli.failures import spelled
from benchctl.cli.options import (
    RESULTS,
    AsJson,
    Overrides,
    check_names,
    complete_engine,
    refuse_first,
)
from benchctl.cli.screen import say, tell, text_console
from benchctl.engines.engine import engine_for
from benchctl.engines.environment import INSTALLABLE, device_here, engines_directory, install_engine, recipe_for
from benchctl.errors import EngineUnavailableError, UsageError
from benchctl.measure.builds import checkout_of, make_build
from benchctl.measure.doctor.check import Check
from benchctl.measure.doctor.machine import engine_checks, inspect_machine
from benchctl.profile.choices import ServerOptions
from benchctl.profile.engine_table import ENGINES, PLAIN_DIALECT, is_virtual
from benchctl.profile.files import preset_files
from benchctl.profile.init import (
    VALUES,
    Change,
    NewProfile,
    Prompts,
    build_option,
    check_dialect,
    new_name,
    new_profile,
)
from benchctl.profile.load import load_profile, parse_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.report.table import table_of
from benchctl.units import count_of
from benchctl.untrusted.text import visible_line
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
_WORDS: Final = {
    r":\d+: (variants\.other-server\.server|engine\.options)\.url": "the server's address",
    r":\d+: variants\.\S+?\.(server|sampling|request)\.": "--value ",
    r"^:\d+: not readable": "--value: not readable",
    r"^:\d+: model:": "--model:",
    r", first in line \d+": "",
}
"""The options of ``init`` by the lines of a profile that is not written yet."""
T = TypeVar("T")
_STYLES: Final = {"ok": "green", "warning": "yellow", "missing": "red"}

engines = typer.Typer(
    add_completion=False,
    help="Install engines, each into an environment of its own, and list them.",
    no_args_is_help=True,
)


def init(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the profile, written to NAME.yaml.")
    ] = None,
    change: Annotated[
        Change | None,
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
            help="What it changes to: OPTION=VALUE or a flag; the path, or with --repo the commit, of each build; "
            "FIELD=VALUE; the other model; the address of each server. Several values of one option: OPTION=A,B,C. "
            "Repeat as needed.",
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
    repo: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Git repository of the engine: the values are two of its commits, and each gets a build under "
            "builds/, the baseline's first.",
        ),
    ] = None,
    build: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            parser=shlex.split,
            help="With --repo: your command that makes a build, run in the checkout of each commit, such as 'cmake "
            "--build build'; repeat as needed.",
        ),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="With --repo: what is measured, in a checkout: the program or interpreter that a build has, or a "
            "directory of the repository for PYTHONPATH.",
            show_default="build/bin/llama-server or .venv/bin/python",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace NAME.yaml if it exists.")] = False,
) -> None:
    """Write a profile that measures one change, and print the command that runs it.

    At a terminal, what the options leave open is asked. Example: benchctl init mine --change flag --engine sim
    --value max_num_seqs=4

    Two commits of an engine, each in a git worktree where --build makes its build: benchctl init mine --repo
    ~/llama.cpp --value main --value HEAD --engine llamacpp --model models/tiny --build 'cmake -B build' --build
    'cmake --build build'
    """
    refuse_first(
        {
            "--build and --program are of the commits of --repo DIR; add that": (
                repo is None and (build or program)
            ),
            f"--repo {repo} is of builds that benchctl starts; leave out --url, and any --change but build": (
                repo is not None and (url is not None or change not in {None, Change.BUILD})
            ),
        }
    )
    own = None if prompts is None else _prompts_in(prompts)
    complete = partial(_completed, prompts=own, repository=repo, commands=build or (), program=program)
    named = partial(new_name, is_replaced=force)
    change = change if repo is None else Change.BUILD
    try:
        profile, text = _answered(name, change, engine, model, tuple(value or ()), url, named, complete)
    except typer.Abort:
        raise KeyboardInterrupt from None
    path = Path(f"{profile.name}.yaml")
    path.write_text(f"{text}# written by: {visible_line(shlex.join(['benchctl', *sys.argv[1:]]))}\n", "utf-8")
    say(f"{path}: {profile.description}; {count_of(profile.blocks, 'block')} on {profile.engine.kind}")
    say("edit it, or leave it as it is, then run it:")
    say(f"  {shlex.join(['benchctl', 'run', profile.name])}")
    if len(profile.variants) == 1:
        parent = RESULTS / profile.name
        say("change the server, run it again, then compare the first directory with the second:")
        say(f"  benchctl compare {parent}/FIRST {parent}/SECOND")


def _prompts_in(path: Path) -> Prompts:
    lengths = [row.output_len for row in own_rows(str(path), "--prompts")]
    return Prompts(path=str(path), num_rows=len(lengths), has_output_lengths=None not in lengths)


def _completed(
    new: NewProfile,
    prompts: Prompts | None,
    repository: Path | None,
    commands: Sequence[Sequence[str]],
    program: str | None,
) -> tuple[Profile, str]:
    """The profile with its prompts, and with builds in place of the commits of a repository; and its text.

    Raises UsageError for answers that make no valid profile.
    """
    new = replace(new, prompts=prompts)
    if repository is not None:
        of_build = program or build_option(new.engine, new.kind)[1]
        checkouts = [checkout_of(repository, commit) for commit in new.values]
        paths = [str(make_build(checkout, commands, of_build)) for checkout in checkouts]
        new = replace(new, commits=new.values, values=tuple(paths))
    from benchctl.measure.on_file import tokens_of_start

    text = new_profile(new, tokens_of_start(new.kind, new.model or ""))
    with spelled(_WORDS):
        profile = parse_profile(f"{text}name: {new.name}\n", "")
    check_names(profile)
    return profile, text


def _answered(
    name: str | None,
    change: Change | None,
    engine: str | None,
    model: str | None,
    values: tuple[str, ...],
    url: str | None,
    named: Callable[[str], str],
    complete: Callable[[NewProfile], T],
) -> T:
    """The result of ``complete`` for the options and, at a terminal, the answers; ``named`` checks the name.

    Raises UsageError that names every option that is missing.
    """
    name = None if name is None else named(name)
    if url is not None:
        return complete(
            NewProfile(
                name=name or named("my-server"),
                change=change or (Change.SAMPLER if values else None),
                engine=check_dialect(engine or PLAIN_DIALECT),
                kind="attach",
                model=model,
                values=values,
                url=url,
            )
        )
    if not _is_asked():
        _refuse_missing(change, engine, model, values)
    if change is None:
        say("What changes?")
        for number, (word, meaning) in enumerate(_QUESTIONS.items(), start=1):
            say(f"  {number}  {word:8} {meaning}")
        change = _ask("Number or word", "1", _change_of)
    if engine is not None:
        engine, kind = _kind_of(change, engine)
    else:
        is_engine = change is not Change.SERVER
        question = "Engine ('benchctl engines list' shows all)" if is_engine else "Dialect, such as vllm or sglang"
        engine, kind = _ask(question, installed_engine() if is_engine else PLAIN_DIALECT, partial(_kind_of, change))
    if model is None and is_virtual(kind):
        model = _ask("Model", _SIMULATED_MODEL, str)
    elif model is None and change is not Change.SERVER:
        say(f"A model that {engine} can load; without one: benchctl models make-tiny models/tiny --gguf")
        model = _ask("Model (directory or name)", None, str)
    name = name or _ask("Name", f"my-{change}", named)
    new = NewProfile(name=name, change=change, engine=engine, kind=kind, model=model, values=values)
    return complete(new) if values else _repeated(lambda: complete(replace(new, values=_ask_values(change, kind))))


def _is_asked() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask(question: str, default: str | None, check: Callable[[str], T]) -> T:
    """The result of ``check`` for the answer, or for the default where nobody can be asked."""
    if default is not None and not _is_asked():
        return check(default)
    return _repeated(lambda: check(typer.prompt(question, default, type=str)))


def _repeated(answered: Callable[[], T]) -> T:
    """The answer, asked for again with the reason as often as it is refused."""
    while True:
        try:
            return answered()
        except UsageError as error:
            say(str(error))


def _change_of(answer: str) -> Change:
    """A kind of change, by its word or number."""
    word = dict(zip("12345", _QUESTIONS, strict=True)).get(answer.strip(), answer.strip())
    if word not in _QUESTIONS:
        raise UsageError(f"{word!r} is none of the changes; choose one of {', '.join(_QUESTIONS)}")
    return Change(word)


def _kind_of(change: Change, engine: str) -> tuple[str, str]:
    """An engine and its kind. Raises UsageError for one that is unknown, or has nothing that changes so."""
    if change is Change.SERVER:
        return check_dialect(engine), "attach"
    kind = load_profile(_ANY_PROFILE, engine=engine).engine.kind
    if change is Change.BUILD:
        build_option(engine, kind)
    return engine, kind


def _refuse_missing(change: Change | None, engine: str | None, model: str | None, values: tuple[str, ...]) -> None:
    """Raise UsageError that names the options in place of answers."""
    needs_model = model is None and change is not Change.SERVER
    engine = engine or (installed_engine() if needs_model else None)
    options = {
        f"--change {'|'.join(_QUESTIONS)}": change is None,
        f"--value ({'what it changes to' if change is None else VALUES[change]})": not values,
        f"--model (for {engine}: a directory or a name; --engine sim needs none)": (
            needs_model and engine not in _SIMULATORS
        ),
    }
    missing = ", ".join(option for option, is_missing in options.items() if is_missing)
    if missing:
        raise UsageError(f"not at a terminal, where these would be asked: add {missing}")


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
        Change.BUILD: ("Old build (interpreter or program; with --repo a commit)", "New build"),
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
    show_all: Annotated[
        bool, typer.Option("--all", help="Say how to get every engine and dataset, and what Slurm answers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine: processor, clock, disk space, GPUs, measured peaks, memory, engines, datasets, Slurm.

    Each problem is followed by the command that fixes it; engines and datasets that are not here, and are not
    needed, are only named. Exit code: 0 if everything that is needed is available
    (without options, what the simulator needs), 2 if something needed is missing. Warnings do not change it.
    """
    no_profile = "--set changes a profile: name it with --profile, as in --profile topk-sweep"
    refuse_first({no_profile: overrides and profile is None})
    needed, preset = dict(map(_needed_engine, engine or ())), engine[0] if engine else None
    planned = None if profile is None else load_profile(profile, engine=preset, overrides=overrides or [])
    from benchctl.cluster.slurm import slurm_check

    checks = (*inspect_machine(output_dir, needed, planned, needs_gpu=gpu), slurm_check())
    missing = [check for check in checks if check.is_obstacle]
    document = {"is_ready": not missing, "checks": [_document(check) for check in checks]}
    tell(document, *_check_lines(checks, missing, show_all=show_all), as_json=as_json)
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


_OPTIONAL: Final = frozenset({"engine", "data", "cluster"})
"""Topics of which nobody needs every part."""


def _check_lines(checks: Sequence[Check], missing: Sequence[Check], *, show_all: bool) -> Iterator[Group | str]:
    """A row for each check, below it its remedy; what is not here and not needed, and what is missing."""
    absent = [check for check in checks if check.topic in _OPTIONAL and check.is_missing and not check.is_needed]
    headings = ("topic", "part", "state", "finding")
    rows: list[tuple[str, ...]] = []
    topic = None
    for check in checks if show_all else [check for check in checks if check not in absent]:
        rows.append((check.topic if check.topic != topic else "", check.name, check.state, check.finding))
        topic = check.topic
        if check.remedy is not None:
            rows.append(("", "", "", f"→ {check.remedy}"))
    yield table_of(headings, rows, left=headings).drawn(
        text_console().width, lambda text: Text(text, style=_STYLES.get(text, ""))
    )
    yield ""
    if absent and not show_all:
        yield f"not here, and not needed: {', '.join(check.name for check in absent)}; see --all"
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
    tell(
        {"directory": str(directory), "engines": documents},
        table_of(headings, ((check.name, check.finding, check.remedy or "") for check in checks), left=headings),
        f"directory: {directory} (set BENCHCTL_ENGINES_DIR for another)",
        as_json=as_json,
    )
