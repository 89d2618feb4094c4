"""What runs say of the software and the machine that did them, held against each other.

Inside one experiment all runs have one engine version and one host, or a difference between arms is not that of
the declared factor. Two experiments may differ there, which is a warning (``comparability.machine_warnings``); but
neither side may change in its middle.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from benchctl.analysis.validity.comparability import Difference
from benchctl.records.loaded import LoadedRun
from benchctl.records.run import RunRecord

_ASKED: Final[Mapping[str, Callable[[RunRecord], str | None]]] = {
    "engine_version": lambda record: record.engine_version,
    "host": lambda record: record.host,
}


def run_differences(
    cells: Mapping[str, tuple[Sequence[LoadedRun], Sequence[LoadedRun]]], *, has_one_experiment: bool
) -> tuple[Difference, ...]:
    """Engine versions and hosts that differ between the runs of two sides, or between those of one side alone where
    the sides are two experiments. Runs that say nothing of it differ from none.
    """
    found = []
    for key, told in _ASKED.items():
        seen = {
            cell: sides
            for cell, runs in cells.items()
            if _differ(sides := (_values(runs[0], told), _values(runs[1], told)), together=has_one_experiment)
        }
        if not seen or (key == "engine_version" and _is_in_configuration(cells)):
            continue
        a, b = (" or ".join(dict.fromkeys(v for sides in seen.values() for v in sides[i])) for i in (0, 1))
        found.append(
            Difference(key, a or "unknown", b or "unknown", () if len(seen) == len(cells) else tuple(seen))
        )
    return tuple(found)


def _values(runs: Sequence[LoadedRun], told: Callable[[RunRecord], str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f'"{value}"' for run in runs if (value := told(run.record)) is not None))


def _differ(sides: tuple[Sequence[str], Sequence[str]], *, together: bool) -> bool:
    a, b = sides
    return len({*a, *b}) > 1 if together else max(len(a), len(b)) > 1


def _is_in_configuration(cells: Mapping[str, tuple[Sequence[LoadedRun], Sequence[LoadedRun]]]) -> bool:
    """Whether the servers themselves say it, so that it is told as a difference of ``server.version`` already."""
    runs = (run.record for sides in cells.values() for side in sides for run in side)
    return all(run.engine_version == run.effective_config.get("server.version") for run in runs)
