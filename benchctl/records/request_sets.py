"""The request sets of an experiment in memory: one, or one for each value of load factors that change requests."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from benchctl.records.record import PreparedRequest
from benchctl.records.schema import Cell
from benchctl.units import range_of


@dataclass(frozen=True, slots=True)
class RequestSets:
    """Request sets by the load factors in which they differ."""

    sets: tuple[tuple[Cell, tuple[PreparedRequest, ...]], ...]

    @classmethod
    def single(cls, requests: Iterable[PreparedRequest]) -> "RequestSets":
        """One set, for all load points."""
        return cls((({}, tuple(requests)),))

    @property
    def requests(self) -> tuple[PreparedRequest, ...]:
        """The requests of all sets, one set after the other."""
        return tuple(chain.from_iterable(requests for _, requests in self.sets))

    @property
    def number(self) -> str:
        """The number of requests of a load, ``20 to 200`` where sets differ in it."""
        return range_of([len(requests) for _, requests in self.sets])

    def of(self, cell: Cell) -> tuple[PreparedRequest, ...]:
        """The set of a load point, or of a cell with further factors; empty where none has its values."""
        return next((requests for factors, requests in self.sets if factors.items() <= cell.items()), ())
