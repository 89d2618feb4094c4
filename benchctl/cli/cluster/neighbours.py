"""Parts of ``benchctl noise neighbours`` and of ``run --check-neighbours``: blocks that disturb each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchctl.cli.output.outcome import warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchctl.cluster.slots import Slot
    from benchctl.measure.experiment import Outcome
    from benchctl.profile.model import Profile
    from benchctl.records.directory import ResultDirectory
    from benchctl.records.neighbours import NeighbourCheck
    from benchctl.records.noise import NoiseFloor
    from benchctl.records.request import PreparedRequest
    from benchctl.records.stores.neighbour_store import StoredCheck
    from benchctl.workload.prepare import PreparedSet

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
    from benchctl.analysis.planning.neighbours import alone_and_beside, blocks_of_check
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
    from benchctl.cli.experiment import create
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

    from benchctl.cli.experiment import measure
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

    from benchctl.analysis.validity.neighbours_fit import finding_text
    from benchctl.cli.output.screen import wide_console
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

    from benchctl.cli.output.screen import print_json

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

    from benchctl.analysis.validity.neighbours_fit import overall_finding
    from benchctl.cli.output.screen import wide_console

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
