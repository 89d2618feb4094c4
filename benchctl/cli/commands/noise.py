"""``benchctl noise``: the stored noise of this machine, which applies to every experiment on it.

Parts of ``benchctl noise neighbours`` and of ``run --check-neighbours``: blocks that disturb each other.
"""

import datetime as dt
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchctl.cli.commands.noise_neighbours import neighbours
from benchctl.cli.output.verdicts import warn
from benchctl.errors import RecordError, UsageError
from benchctl.formats import percentage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.cluster.slots import Slot
    from benchctl.measure.experiment import Outcome
    from benchctl.profile.model import Profile
    from benchctl.records.directory import ResultDirectory
    from benchctl.records.record import PreparedRequest
    from benchctl.records.stores.neighbour_store import StoredCheck
    from benchctl.records.stores.noise_store import StoredNoise
    from benchctl.records.stores.peaks_store import NoiseFloor
    from benchctl.records.stores.stores import NeighbourCheck, RecordT, StoredFile
    from benchctl.workload.prepare import PreparedSet


app = typer.Typer(
    no_args_is_help=True,
    help="List, show and store noise floors of this machine, from A/A experiments, and measure whether blocks that "
    "run at the same time disturb each other.",
)
app.command("neighbours")(neighbours)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]


@app.command("list")
def list_noise(
    history: Annotated[bool, typer.Option("--history", help="Also list older measurements of each key.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the stored noise by host, engine and model, and the checks of neighbours; the newest measurement of each
    key applies.
    """
    from benchctl.records.stores.neighbour_store import neighbours_directory, stored_checks
    from benchctl.records.stores.noise_store import noise_directory, stored_noise

    store, store_of_checks = noise_directory(), neighbours_directory()
    listed = _listed(stored_noise(store), history=history)
    checks = _listed(stored_checks(store_of_checks), history=history)
    if as_json:
        documents = {
            "store": str(store),
            "noise": [_document(entry) for entry in listed],
            "neighbours_store": str(store_of_checks),
            "neighbours": [check_document(entry) for entry in checks],
        }
        print(json.dumps(documents, indent=1))
        return
    if listed:
        _print_list(store, listed)
    else:
        print(f"{store} contains no noise yet; 'benchctl run NAME --aa' measures it")
    if checks:
        print()
        print_checks(checks)
        print(f"checks of neighbours: {store_of_checks}")


def _listed(entries: "tuple[StoredFile[RecordT], ...]", *, history: bool) -> "tuple[StoredFile[RecordT], ...]":
    """All of a store, or what counts of it and what cannot be read."""
    from benchctl.records.stores.stores import newest_of_each

    unreadable = tuple(entry for entry in entries if entry.content is None)
    return entries if history else (*newest_of_each(entries), *unreadable)


@app.command("show")
def show(
    what: Annotated[str, typer.Argument(metavar="KEY|DIR", help="Key from the list, or a result directory.")],
    as_json: JsonOption = False,
) -> None:
    """Show noise floor and standard deviation of each metric: of a key, of an A/A experiment, or those a result
    used. Of a check of neighbours: what it found.
    """
    from benchctl.records.stores.stores import NeighbourCheck

    source, measured = _look_up(what)
    if isinstance(measured, NeighbourCheck):
        show_check(source, measured, as_json=as_json)
    elif as_json:
        print(json.dumps({"from": source, **_values(measured)}, indent=1))
    else:
        _print_noise(source, measured)


@app.command("add")
def add(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Result directory of a finished A/A experiment.")
    ],
) -> None:
    """Store the noise of an A/A experiment for the machine on which it was measured."""
    from benchctl.analysis.experiment.experiment import load_experiment
    from benchctl.measure.noise_on_file import sound_noise
    from benchctl.records.stores.noise_store import noise_directory, store_noise

    path = store_noise(noise_directory(), sound_noise(load_experiment(directory)))
    print(f"stored: {path.parent.name}/{path.stem}")


@app.command("remove")
def remove(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Key with its whole history, or KEY/TIME for one measurement.")
    ],
) -> None:
    """Delete noise, or a check of neighbours, from its store; result directories keep their copies."""
    from benchctl.records.stores.neighbour_store import find_checks, neighbours_directory
    from benchctl.records.stores.noise_store import find_noise, noise_directory
    from benchctl.records.stores.stores import remove_files

    if _is_of_check(key):
        checks = find_checks(neighbours_directory(), key)
        name, number = checks[0].key, remove_files(checks)
    else:
        entries = find_noise(noise_directory(), key)
        name, number = entries[0].key, remove_files(entries)
    print(f"removed {number} measurement{'' if number == 1 else 's'} of {name}")


def _is_of_check(key: str) -> bool:
    """True where checks of neighbours have such a key, and noise has not."""
    from benchctl.records.stores.neighbour_store import neighbours_directory, stored_checks
    from benchctl.records.stores.noise_store import noise_directory, stored_noise

    has_noise = any(entry.name.startswith(key) for entry in stored_noise(noise_directory()))
    return not has_noise and any(entry.name.startswith(key) for entry in stored_checks(neighbours_directory()))


def _look_up(what: str) -> "tuple[str, NoiseFloor | NeighbourCheck]":
    """The noise or check of a directory or key, with its source; a directory takes precedence over a key of its
    name.
    """
    from benchctl.records.archive.archive import is_archive
    from benchctl.records.stores.neighbour_store import find_checks, neighbours_directory
    from benchctl.records.stores.noise_store import find_noise, noise_directory

    if Path(what).is_dir() or is_archive(Path(what)):
        return what, _of_directory(Path(what))
    entries = (
        find_checks(neighbours_directory(), what) if _is_of_check(what) else find_noise(noise_directory(), what)
    )
    for entry in entries:
        if entry.content is not None:
            return entry.name, entry.content
    raise RecordError("\n".join(entry.problem or "" for entry in entries))


def _of_directory(path: Path) -> "NoiseFloor | NeighbourCheck":
    """Of a check its own result, of any other directory its noise."""
    from benchctl.cluster.neighbours.check import is_check
    from benchctl.records.directory import open_results
    from benchctl.records.stores.stores import load_neighbours

    results = open_results(path)
    check = load_neighbours(results.path) if is_check(results) else None
    if check is not None and not check.is_done:
        raise UsageError(
            f"{path} is a check of neighbours without a result yet; continue it with 'benchctl noise neighbours "
            f"--resume {path}'"
        )
    return _noise_of_directory(path) if check is None else check


def _noise_of_directory(path: Path) -> "NoiseFloor":
    from benchctl.analysis.experiment.experiment import load_experiment
    from benchctl.analysis.planning.noise_floor import is_repeated_baseline
    from benchctl.measure.noise_on_file import sound_noise
    from benchctl.records.directory import open_results
    from benchctl.records.stores.peaks_store import load_noise

    noise = load_noise(open_results(path).path)
    if noise is not None:
        return noise
    experiment = load_experiment(path)
    if is_repeated_baseline(experiment.profile):
        return sound_noise(experiment)
    raise UsageError(
        f"{path} has no noise: none was on file when it was measured. 'benchctl compare --noise-floor DIR' "
        "uses that of an A/A experiment"
    )


def _values(noise: "NoiseFloor") -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(noise), "age_days": _age_days(noise)}


def _document(entry: "StoredNoise") -> dict[str, Any]:
    values = {} if entry.content is None else _values(entry.content)
    return {"key": entry.key, "name": entry.name, "path": str(entry.path), "problem": entry.problem, **values}


def _print_list(store: Path, entries: "Sequence[StoredNoise]") -> None:
    from rich.table import Table

    from benchctl.cli.screen import wide_console

    table = Table(box=None, pad_edge=False)
    for title in ("key", "engine", "model", "blocks", "floor of step_ms", "when", "age", "from"):
        table.add_column(title, justify="right" if title in {"blocks", "floor of step_ms", "age"} else "left")
    for entry in entries:
        noise = entry.content
        if noise is None:
            table.add_row(entry.name, "", "", "", "", "", "", entry.problem)
            continue
        step = noise.metrics.get("step_ms")
        blocks = max((metric.num_blocks for metric in noise.metrics.values()), default=0)
        floor = "n/a" if step is None else percentage(step.floor_frac)
        engine = f"{noise.engine} {noise.engine_version or ''}".rstrip()
        table.add_row(
            entry.key, engine, noise.model, str(blocks), floor, noise.measured_at, _age(noise), noise.source
        )
    wide_console().print(table)
    print(f"store: {store}")


def _print_noise(source: str, noise: "NoiseFloor") -> None:
    from rich.table import Table

    from benchctl.cli.screen import wide_console

    console = wide_console()
    devices = ", ".join(noise.gpus) or "no GPU"
    engine = f"{noise.engine} {noise.engine_version or ''}".rstrip()
    console.print(f"{source}: {engine} with {noise.model} on {noise.host}, {devices}")
    console.print(f"measured {noise.measured_at} ({_age(noise)}) in {noise.source}")
    console.print()
    table = Table(box=None, pad_edge=False)
    for title in ("metric", "floor", "sd between blocks", "blocks"):
        table.add_column(title, justify="left" if title == "metric" else "right")
    for name, metric in noise.metrics.items():
        table.add_row(name, percentage(metric.floor_frac), percentage(metric.log_sd), str(metric.num_blocks))
    console.print(table)


def _age(noise: "NoiseFloor") -> str:
    days = _age_days(noise)
    return "today" if days < 1 else "1 day old" if days == 1 else f"{days} days old"


def _age_days(noise: "NoiseFloor") -> int:
    from benchctl.analysis.validity.noise import age_days

    return age_days(noise, dt.datetime.now(dt.UTC))


CHECK_DIRECTORY = "neighbours"
"""Folder of the check below the experiment for which ``--check-neighbours`` made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """A check that was measured. ``check`` is None where it came to nothing; a warning has said why."""

    results: "ResultDirectory"
    outcome: "Outcome"
    check: "NeighbourCheck | None"


def note_neighbours(
    results: "ResultDirectory",
    profile: "Profile",
    requests: "tuple[PreparedRequest, ...]",
    slots: "tuple[Slot, ...]",
    *,
    checks: bool,
    is_quiet: bool,
) -> None:
    """Before blocks of ``results`` are measured side by side on ``slots``: check first where ``checks``, copy the
    check that applies into the directory, and print its warnings.
    """
    from benchctl.cluster.neighbours.check import nothing_to_check
    from benchctl.cluster.neighbours.on_file import check_on_file
    from benchctl.cluster.neighbours.on_file import note_neighbours as note

    if checks and (reason := _why_unchecked(nothing_to_check(profile), slots)) is not None:
        print(reason, flush=True)
        checks = False
    check = None
    if checks:
        check = check_on_file(profile, slots, results.manifest().gpus)
        if check is None:
            check = _check_before(results, profile, requests, slots, is_quiet=is_quiet)
        else:
            print(f"neighbours were checked on {check.measured_at[:10]}: {check.source}", flush=True)
    for warning in note(results, profile, slots, check):
        warn(warning.message)


def _why_unchecked(reason: str | None, slots: "Sequence[Slot]") -> str | None:
    return "one block at a time has no neighbours: nothing to check" if len(slots) < 2 else reason


def _check_before(
    results: "ResultDirectory",
    profile: "Profile",
    requests: "tuple[PreparedRequest, ...]",
    slots: "tuple[Slot, ...]",
    *,
    is_quiet: bool,
) -> "NeighbourCheck | None":
    """The check of an experiment that is about to begin, with its request set, in a folder of its directory."""
    from benchctl.cluster.neighbours.check import slots_of_check
    from benchctl.errors import UsageError
    from benchctl.records.directory import open_results
    from benchctl.workload.prepare import PreparedSet

    path = results.path / CHECK_DIRECTORY
    if path.is_dir() and any(path.iterdir()):
        if slots_of_check(open_results(path)) != slots:
            raise UsageError(
                f"{path} is a check that was begun on other slots than those that are free now; free them, or "
                "leave out --check-neighbours"
            )
        return continue_check(path, None, is_quiet=is_quiet, stores=True).check
    manifest = results.manifest()
    prepared = PreparedSet(
        requests=requests,
        content=(results.path / "requests.jsonl").read_bytes(),
        sha256=manifest.request_set_sha256,
        dataset=manifest.dataset,
        lengths_from=manifest.lengths_from,
    )
    planned, noise = plan_check(profile, None)
    return begin_check(planned, prepared, slots, noise, directory=path, is_quiet=is_quiet).check


def plan_check(profile: "Profile", num_blocks: int | None) -> "tuple[Profile, NoiseFloor | None]":
    """The experiment of a check of ``profile``, and the noise on file; prints how many blocks it has, and why."""
    from benchctl.analysis.validity.noise import alone_and_beside, blocks_of_check
    from benchctl.measure.noise_on_file import noise_of_server

    noise = noise_of_server(profile)
    planned = blocks_of_check(profile, noise)
    if num_blocks is None:
        print(f"{planned.number} blocks, alone and beside neighbours in each: {planned.reason}", flush=True)
    elif num_blocks < planned.number:
        warn(f"--blocks {num_blocks} are fewer than the {planned.number} of a check by default: {planned.reason}")
    return alone_and_beside(profile, num_blocks or planned.number), noise


def begin_check(
    profile: "Profile",
    prepared: "PreparedSet",
    slots: "tuple[Slot, ...]",
    noise: "NoiseFloor | None",
    *,
    directory: Path | None = None,
    output_dir: Path | None = None,
    label: str | None = None,
    is_quiet: bool = False,
    stores: bool = True,
) -> CheckOutcome:
    """Measure a new check in ``directory``, or in a new one below ``output_dir``, on slots that are held."""
    from benchctl.cli.conduct import create
    from benchctl.cluster.neighbours import check as checks

    results = create(profile, prepared, output_dir or Path("results"), label, directory=directory)
    checks.begin_check(results, profile, slots, noise)
    print(f"results in {results.path}", flush=True)
    return _measure_check(results, profile, prepared.requests, slots, is_quiet=is_quiet, stores=stores)


def continue_check(path: Path, num_blocks: int | None, *, is_quiet: bool, stores: bool) -> CheckOutcome:
    """Measure what is left of a check, on its slots, after blocks were added to it until it has ``num_blocks``."""
    from benchctl.cluster.neighbours.check import slots_of_check
    from benchctl.measure.result_directory import reopen_experiment
    from benchctl.measure.resume.extension import extend_experiment

    reopened = reopen_experiment(path, None)
    slots = slots_of_check(reopened.results)
    if num_blocks is not None:
        extend_experiment(reopened, num_blocks)
    print(f"continuing {path}", flush=True)
    return _measure_check(
        reopened.results, reopened.profile, reopened.requests, slots, is_quiet=is_quiet, stores=stores
    )


def _measure_check(
    results: "ResultDirectory",
    profile: "Profile",
    requests: "tuple[PreparedRequest, ...]",
    slots: "tuple[Slot, ...]",
    *,
    is_quiet: bool,
    stores: bool,
) -> CheckOutcome:
    import shlex

    from benchctl.cli.conduct import measure
    from benchctl.cluster.neighbours.check import RunsBeside, conclude_check
    from benchctl.errors import NotComparableError, UsageError
    from benchctl.records.stores.neighbour_store import neighbours_directory, store_check

    next_step = f"Continue with: benchctl noise neighbours --resume {shlex.quote(str(results.path))}"
    beside = RunsBeside(results, slots)
    outcome = measure(results, profile, requests, next_step, is_quiet=is_quiet, simulate=beside)
    try:
        check = conclude_check(results)
    except (NotComparableError, UsageError) as error:
        warn(str(error))
        return CheckOutcome(results=results, outcome=outcome, check=None)
    print_check(check)
    if stores:
        path = store_check(neighbours_directory(), check)
        print(f"stored for this machine: benchctl noise show {path.parent.name}")
    return CheckOutcome(results=results, outcome=outcome, check=check)


def print_check(check: "NeighbourCheck") -> None:
    """Print what a check found, for each metric that decides."""
    from rich.table import Table

    from benchctl.analysis.validity.noise import finding_text
    from benchctl.cli.screen import wide_console
    from benchctl.formats import NOT_AVAILABLE, change_of_ratio, percentage

    table = Table(box=None, pad_edge=False)
    interval = f"{percentage(check.confidence)} interval"
    for title in ("metric", "beside / alone", interval, "claimed beyond", "blocks", "finding"):
        table.add_column(title, justify="left" if title in {"metric", "finding"} else "right")
    for name, effect in check.metrics.items():
        ends = (effect.ci_low, effect.ci_high)
        bounds = ", ".join(NOT_AVAILABLE if end is None else change_of_ratio(end) for end in ends)
        margin, blocks = f"±{percentage(effect.margin_frac, 2)}", str(effect.num_blocks)
        table.add_row(name, change_of_ratio(effect.ratio), f"[{bounds}]", margin, blocks, effect.finding)
    wide_console().print(table)
    print(finding_text(check))


def show_check(source: str, check: "NeighbourCheck", *, as_json: bool) -> None:
    """Print a stored check with its conditions."""
    import msgspec

    from benchctl.cli.screen import print_json

    if as_json:
        print_json({"from": source, **msgspec.to_builtins(check)})
        return
    devices, engine = ", ".join(check.gpus) or "no GPU", f"{check.engine} {check.engine_version or ''}".rstrip()
    print(f"{source}: {check.parallel} blocks at a time, {engine} with {check.model} on {check.host}, {devices}")
    print(f"measured {check.measured_at} in {check.source}")
    print()
    print_check(check)


def check_document(entry: "StoredCheck") -> "dict[str, Any]":
    """A stored check as JSON."""
    import msgspec

    values = {} if entry.content is None else msgspec.to_builtins(entry.content)
    return {"key": entry.key, "name": entry.name, "path": str(entry.path), "problem": entry.problem, **values}


def print_checks(entries: "Sequence[StoredCheck]") -> None:
    """Print one line for each stored check."""
    from rich.table import Table

    from benchctl.analysis.validity.noise import overall_finding
    from benchctl.cli.screen import wide_console

    table = Table(box=None, pad_edge=False)
    for title in ("key", "engine", "model", "at a time", "finding", "when", "from"):
        table.add_column(title, justify="right" if title == "at a time" else "left")
    for entry in entries:
        check = entry.content
        if check is None:
            table.add_row(entry.name, "", "", "", "", "", entry.problem)
            continue
        engine = f"{check.engine} {check.engine_version or ''}".rstrip()
        parallel, finding = str(check.parallel), overall_finding(check)
        table.add_row(entry.key, engine, check.model, parallel, finding, check.measured_at, check.source)
    wide_console().print(table)
