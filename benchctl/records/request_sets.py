"""The request sets of an experiment in memory: one, or one for each value of load factors that change requests."""

from collections.abc import Iterable
from dataclasses import dataclass

from benchctl.records.record import PreparedRequest
from benchctl.records.schema import Cell


@dataclass(frozen=True, slots=True)
class RequestSets:
    """Request sets by the load factors in which they differ."""

    sets: tuple[tuple[Cell, tuple[PreparedRequest, ...]], ...]

    @classmethod
    def single(cls, requests: Iterable[PreparedRequest]) -> "RequestSets":
        """One set, for all load points."""
        return cls((({}, tuple(requests)),))

    def of(self, cell: Cell) -> tuple[PreparedRequest, ...]:
        """The set of a load point, or of a cell with further factors; empty where none has its values."""
        return next((requests for factors, requests in self.sets if factors.items() <= cell.items()), ())
