"""Differences of engine version and host between runs.

All runs of one experiment have one engine version and one host; otherwise a difference between arms is not that of
the declared factor. Two experiments may differ, with a warning (``comparability.machine_warnings``), but neither
side may change during the experiment.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from benchctl.analysis.validity.comparability import Difference
from benchctl.records.loaded import LoadedRun
from benchctl.records.run import RunRecord

_FIELDS: Final[Mapping[str, Callable[[RunRecord], str | None]]] = {
    "engine_version": lambda record: record.engine_version,
    "host": lambda record: record.host,
}


def run_differences(
    cells: Mapping[str, tuple[Sequence[LoadedRun], Sequence[LoadedRun]]], *, has_one_experiment: bool
) -> tuple[Difference, ...]:
    """Engine versions and hosts that differ between the runs of two sides, or within one side if the sides are two
    experiments. Runs without the record differ from none.
    """
    differences = []
    for key, value_of in _FIELDS.items():
        differing = {
            cell: sides
            for cell, runs in cells.items()
            if _differ(
                sides := (_values(runs[0], value_of), _values(runs[1], value_of)), together=has_one_experiment
            )
        }
        if not differing or (key == "engine_version" and _is_in_configuration(cells)):
            continue
        a, b = (" or ".join(dict.fromkeys(v for sides in differing.values() for v in sides[i])) for i in (0, 1))
        differences.append(
            Difference(
                key, a or "unknown", b or "unknown", () if len(differing) == len(cells) else tuple(differing)
            )
        )
    return tuple(differences)


def _values(runs: Sequence[LoadedRun], value_of: Callable[[RunRecord], str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f'"{value}"' for run in runs if (value := value_of(run.record)) is not None))


def _differ(sides: tuple[Sequence[str], Sequence[str]], *, together: bool) -> bool:
    a, b = sides
    return len({*a, *b}) > 1 if together else max(len(a), len(b)) > 1


def _is_in_configuration(cells: Mapping[str, tuple[Sequence[LoadedRun], Sequence[LoadedRun]]]) -> bool:
    """True if the servers report it, so that it is a difference of ``server.version`` already."""
    runs = (run.record for sides in cells.values() for side in sides for run in side)
    return all(run.engine_version == run.effective_config.get("server.version") for run in runs)
