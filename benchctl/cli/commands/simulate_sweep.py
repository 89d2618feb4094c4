"""``benchctl simulate sweep``: the load that a setting carries, by simulation."""

import os
from enum import StrEnum
from itertools import product
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Final

import typer

from benchctl.cli.commands.simulate import Jobs, simulated_profile
from benchctl.cli.options.experiment import RESULTS, AsJson, EnginePreset, OutputDir, ProfileName, Seed
from benchctl.cli.output.outcome import warn
from benchctl.errors import UsageError
from benchctl.profile.sections.ranges import MAX_BLOCKS

if TYPE_CHECKING:
    from benchctl.measure.capacity.point import LoadKind
    from benchctl.profile.model import Profile

_NO_OBJECTIVE_HELD: Final = 1


class Searched(StrEnum):
    """The size of a load that ``--largest`` searches."""

    RATE = "rate"
    MAX_CONCURRENCY = "max-concurrency"


_Rates = Annotated[
    str | None, typer.Option("--rate", metavar="A,B,…", help="Requests per second of an open loop to try.")
]
_Concurrencies = Annotated[
    str | None, typer.Option("--max-concurrency", metavar="A,B,…", help="Slots of a closed loop to try.")
]
_Slos = Annotated[
    list[str] | None,
    typer.Option("--slo", metavar="METRIC=LIMIT", help="Limit that a metric must keep; repeat as needed."),
]
_LargestOption = Annotated[
    Searched | None,
    typer.Option("--largest", help="Search the largest load of each arm that keeps every --slo, by bisection."),
]
_SweptOverrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C,D,…", help="Try each value of a setting; repeat for every combination."),
]
_BlocksOfPoint = Annotated[
    int,
    typer.Option(
        "--blocks", min=1, max=MAX_BLOCKS, help="Servers of each load, whose mean is taken; they differ in noise."
    ),
]


def sweep(
    profile: ProfileName = None,
    engine: EnginePreset = None,
    overrides: _SweptOverrides = None,
    rate: _Rates = None,
    max_concurrency: _Concurrencies = None,
    slo: _Slos = None,
    largest: _LargestOption = None,
    blocks: _BlocksOfPoint = 1,
    seed: Seed = None,
    output_dir: OutputDir = RESULTS,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Simulate each arm of a profile under several loads: a saturation curve, and the largest load under limits.

    Ends with 1 if no load of any arm keeps every --slo.
    """
    from benchctl.cli.output.screen import print_json
    from benchctl.cli.output.sweep import print_sweep, sweep_document, write_sweep
    from benchctl.measure.capacity.objective import parse_objective
    from benchctl.measure.capacity.sweep import run_sweep, sweep_points

    objectives = [parse_objective(text) for text in slo or []]
    kind, sizes = _loads(rate, max_concurrency, largest)
    if largest is not None and not objectives:
        raise UsageError("--largest needs a limit: give --slo METRIC=LIMIT, such as --slo p99_ttft_ms=200")
    profiles = _profiles(profile, engine, overrides or [], blocks, seed)
    points = sweep_points(profiles, kind, sizes)
    outcome = run_sweep(points, objectives, searches=largest is not None, jobs=jobs or os.cpu_count() or 1)
    written = write_sweep(outcome, profiles[0][1], output_dir)
    if as_json:
        print_json({"files": [str(path) for path in written], **sweep_document(outcome, profiles[0][1])})
    else:
        print_sweep(outcome, profiles[0][1])
        print("files: " + ", ".join(map(str, written)))
    if objectives and not any(each.holds for each in outcome.points):
        warn("no load of any arm keeps every limit")
        raise typer.Exit(_NO_OBJECTIVE_HELD)


def _loads(
    rate: str | None, concurrency: str | None, largest: Searched | None
) -> "tuple[LoadKind | None, list[float]]":
    """The swept size of the load, and its values; a search without values begins at 1."""
    if rate is not None and concurrency is not None:
        raise UsageError("--rate is for an open loop and --max-concurrency for a closed one; give one of the two")
    if (concurrency if largest is Searched.RATE else rate if largest is not None else None) is not None:
        raise UsageError(f"--largest {largest} searches another load than the one whose values are given")
    if rate is not None:
        return "rate", _numbers(rate, "--rate")
    if concurrency is not None:
        return "max-concurrency", _numbers(concurrency, "--max-concurrency", is_whole=True)
    return (None, []) if largest is None else (largest.value, [1.0])


def _numbers(text: str, option: str, *, is_whole: bool = False) -> list[float]:
    try:
        numbers = sorted({float(int(part)) if is_whole else float(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"{option} {text!r}: expected numbers separated by commas, such as 1,2,4") from None
    if not (numbers[0] > 0 and isfinite(numbers[-1])):
        raise UsageError(f"{option} {text!r}: each must be above 0")
    return numbers


def _profiles(
    name: str | None, engine: str | None, overrides: list[str], blocks: int, seed: int | None
) -> "list[tuple[tuple[str, ...], Profile]]":
    """A profile for each combination of settings, with those that differ between them."""
    choices = [_values(override) for override in overrides]
    profiles = []
    for combination in product(*choices):
        differing = tuple(each for each, values in zip(combination, choices, strict=True) if len(values) > 1)
        profiles.append((differing, simulated_profile(name, engine, list(combination), blocks, seed)))
    return profiles


def _values(override: str) -> list[str]:
    """``a=1,2`` as ``a=1`` and ``a=2``; a list or a mapping in YAML is one value."""
    key, separator, value = override.partition("=")
    if not separator or value.lstrip().startswith(("[", "{", '"', "'")):
        return [override]
    return [f"{key}={part}" for part in value.split(",")]
