"""The steps of a log as a compact table of whole numbers, from which columns are made on demand."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from operator import attrgetter
from typing import Final, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.records.columns.tensor_file import Numbers, in_fewest_bytes
from benchctl.records.laws import Law, law_of
from benchctl.records.step import Clock, StepPhase, StepRecord

PHASES: Final[tuple[StepPhase, ...]] = get_args(StepPhase)
CLOCKS: Final[tuple[Clock, ...]] = get_args(Clock)
ACCEPTED_BY_POSITION: Final = "accepted_by_position"
OPTIONAL: Final = tuple(
    field.name
    for field in msgspec.structs.fields(StepRecord)
    if field.default is None and field.name != ACCEPTED_BY_POSITION
)
"""The counts and flags of a step that an engine may leave out."""
SECTION_PREFIX: Final = "sections_ns."
POSITION_PREFIX: Final = f"{ACCEPTED_BY_POSITION}."
_REQUIRED: Final = ("start_ns", "dur_ns", "num_seqs", "is_warmup")
_WORDS: Final[Mapping[str, Mapping[str, int]]] = {
    "clock": {clock: index for index, clock in enumerate(CLOCKS)},
    "phase": {phase: index for index, phase in enumerate(PHASES)},
}
_KNOWN_PREFIX: Final = "known."


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """Whole numbers by name, a value for each step, each array in as few bytes as its largest value needs.

    A clock or phase is its index in ``CLOCKS`` or ``PHASES``. Sections and positions of drafts have a name each,
    after ``SECTION_PREFIX`` and ``POSITION_PREFIX``. A value that only some steps have is 0 in the others, and the
    array of its name after ``known.`` has 1 for each step that has it.
    """

    arrays: Mapping[str, Numbers]

    def __len__(self) -> int:
        return len(self.arrays["dur_ns"])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of values that any step has."""
        return tuple(name for name in self.arrays if not name.startswith(_KNOWN_PREFIX))

    def is_known(self, name: str) -> npt.NDArray[np.bool_]:
        """True for each step that has the value."""
        if name not in self.arrays:
            return np.zeros(len(self), dtype=np.bool_)
        is_known = self.arrays.get(_KNOWN_PREFIX + name)
        return np.ones(len(self), dtype=np.bool_) if is_known is None else is_known.astype(np.bool_)

    def rows(self, *, is_warmup: bool) -> slice | npt.NDArray[np.intp]:
        """Index of the steps of the load, or of those of the warm-up: a slice if they follow one another."""
        indices = np.flatnonzero(self.arrays["is_warmup"] == is_warmup)
        if not len(indices):
            return slice(0, 0)
        first, last = int(indices[0]), int(indices[-1])
        return slice(first, last + 1) if last - first + 1 == len(indices) else indices


def checked_table(arrays: Mapping[str, Numbers]) -> StepTable:
    """The table in a file. Raises ValueError where arrays are missing, or have what no log can have."""
    missing = [name for name in (*_REQUIRED, *_WORDS) if name not in arrays]
    if missing or len({len(values) for values in arrays.values()}) > 1:
        raise ValueError(f"{', '.join(missing) or 'no array'} is missing, or arrays differ in length")
    for name, values in arrays.items():
        law = _law_of(name)
        if len(values) and not (law.least <= int(values.min()) and int(values.max()) <= law.most):
            raise ValueError(f"{name} has numbers from {values.min()} to {values.max()}")
    return StepTable(arrays)


@cache
def _law_of(name: str) -> Law:
    """The law of an array by its name. Raises ValueError for a name that no table has."""
    if name.startswith(_KNOWN_PREFIX):
        return Law(0, 1)
    if name in _WORDS:
        return Law(0, len(_WORDS[name]) - 1)
    if name in (*_REQUIRED, *OPTIONAL):
        return law_of(StepRecord, name)
    if name.startswith(SECTION_PREFIX):
        return law_of(StepRecord, "sections_ns")
    if re.fullmatch(rf"{re.escape(POSITION_PREFIX)}[1-9][0-9]{{0,3}}", name):
        return law_of(StepRecord, ACCEPTED_BY_POSITION)
    raise ValueError(f"{name} is not an array of steps")


def table_of(records: Sequence[StepRecord]) -> StepTable:
    """The table of these steps."""
    arrays = {name: _whole([*map(attrgetter(name), records)]) for name in _REQUIRED}
    for name, indices in _WORDS.items():
        arrays[name] = _whole([*map(indices.__getitem__, map(attrgetter(name), records))])
    for name in OPTIONAL:
        arrays |= _optional(name, [*map(attrgetter(name), records)])
    sections = [record.sections_ns for record in records]
    for name in sorted(set(chain.from_iterable(sections))):
        arrays |= _optional(SECTION_PREFIX + name, [*map(dict.get, sections, repeat(name))])
    accepted = [record.accepted_by_position or () for record in records]
    for index in range(max(map(len, accepted), default=0)):
        counts = [of_step[index] if index < len(of_step) else None for of_step in accepted]
        arrays |= _optional(f"{POSITION_PREFIX}{index + 1}", counts)
    return StepTable(arrays)


def _optional(name: str, values: Sequence[int | None]) -> dict[str, Numbers]:
    """The arrays of a value; none if no step has it."""
    try:
        return {name: _whole(values)}
    except TypeError:  # of None; they are counted only here, because most values are in each step or in none
        if values.count(None) == len(values):
            return {}
    is_known = np.fromiter((value is not None for value in values), np.uint8, len(values))
    return {name: _whole([value or 0 for value in values]), _KNOWN_PREFIX + name: is_known}


def _whole(values: Sequence[int | None]) -> Numbers:
    """Raises TypeError for None."""
    return in_fewest_bytes(np.fromiter(values, np.int64, len(values)))


def joined(tables: Sequence[StepTable]) -> StepTable:
    """One table of the steps of several, in their order."""
    if not tables:
        return table_of(())
    arrays: dict[str, Numbers] = {}
    for name in dict.fromkeys(chain.from_iterable(table.names for table in tables)):
        values = [table.arrays.get(name) for table in tables]
        absent = np.zeros(max(map(len, tables)), dtype=np.uint8)
        pairs = zip(values, tables, strict=True)
        arrays[name] = np.concatenate([absent[: len(table)] if array is None else array for array, table in pairs])
        is_known = np.concatenate([table.is_known(name) for table in tables])
        if not is_known.all():
            arrays[_KNOWN_PREFIX + name] = is_known.view(np.uint8)
    return StepTable(arrays)
