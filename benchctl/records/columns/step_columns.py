"""The steps of a run as columns of numbers, for logs that are too long to handle step by step."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias, overload

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.records.jsonl import read_jsonl
from benchctl.records.step import Clock, StepPhase, StepRecord

Integers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]

PHASES: Final[tuple[StepPhase, ...]] = ("prefill", "decode", "mixed")
ACCEPTED_BY_POSITION: Final = "accepted_by_position"
OPTIONAL: Final = tuple(
    field.name
    for field in msgspec.structs.fields(StepRecord)
    if field.default is None and field.name != ACCEPTED_BY_POSITION
)
"""The counts and flags of a step that an engine may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepColumns:
    """Steps of one run, of its load or of its warm-up, in the order of their log; each array has one value a
    step.
    """

    start_ns: Integers
    dur_ns: Integers
    num_seqs: Integers
    phase: npt.NDArray[np.uint8]
    """Index into ``PHASES``."""
    clocks: tuple[Clock, ...]
    """The clocks that occur, each once, sorted."""
    optionals: Mapping[str, Floats]
    """The fields of ``OPTIONAL`` that any step has; NaN for unknown, 0 and 1 for no and yes."""
    section_ns: Mapping[str, Integers]
    """Time of each section that any step has, by name in sorted order; 0 in steps without it."""
    has_section: Mapping[str, Flags]
    accepted_by_position: Floats | None = None
    """Accepted drafts, a row for each step and a column for each position of a draft; a row of NaN where the step
    does not tell, None when no step does."""

    def __len__(self) -> int:
        return len(self.dur_ns)

    def optional(self, name: str) -> Floats | None:
        """A field of ``OPTIONAL`` with NaN for unknown; None when no step has it. ValueError for another name."""
        if name not in OPTIONAL:
            raise ValueError(f"{name!r} is not an optional field of a step; those are {', '.join(OPTIONAL)}")
        return self.optionals.get(name)

    def total(self, name: str, where: Flags | None = None) -> int | None:
        """Sum of an optional field over the steps of ``where``; None without steps, or if one of them lacks it."""
        values = self.optional(name)
        if values is None:
            return None
        summands = values if where is None else values[where]
        return None if not len(summands) or np.isnan(summands).any() else int(summands.sum())

    def known_values(self, name: str) -> Floats:
        """An optional field in the steps that have it."""
        values = self.optional(name)
        return np.empty(0) if values is None else values[~np.isnan(values)]

    def in_phase(self, phase: StepPhase) -> Flags:
        """True for each step of this phase."""
        return np.equal(self.phase, PHASES.index(phase))


class StepsOfFile(Sequence[StepRecord]):
    """The steps of a log, held in another form. Access to a record reads the file from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[StepRecord]:
        return islice(read_jsonl(self._path, StepRecord), len(self))

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StepRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        return tuple(self)[index]


class DecodedSteps(StepsOfFile):
    """The steps of a short log, held as columns."""

    def __init__(self, path: Path, records: Sequence[StepRecord]) -> None:
        super().__init__(path)
        self._columns = {is_warmup: columns_from(records, is_warmup=is_warmup) for is_warmup in (False, True)}

    def __len__(self) -> int:
        return sum(map(len, self._columns.values()))

    def columns(self, *, is_warmup: bool = False) -> StepColumns:
        """The steps of the load, or those of the warm-up."""
        return self._columns[is_warmup]

    def write_table(self) -> None:
        """Leave a short log alone: it is decoded as fast as a table of it would be read."""


def by_position(columns: Sequence[Floats]) -> Floats | None:
    """A row for each step from a column for each position, which has NaN where a step names none; None without
    columns.
    """
    if not columns:
        return None
    accepted = np.stack(columns, axis=1)
    accepted[np.isnan(accepted) & ~np.isnan(accepted[:, :1])] = 0  # shorter drafts have none accepted there
    return accepted


def exact_sum(values: Integers, weights: Integers | None = None) -> int:
    """Sum of ``values``, or of their products with ``weights``, however large it is."""
    factors = [array for array in (values, weights) if array is not None]
    largest = math.prod(max(-int(array.min()), int(array.max())) for array in factors) if len(values) else 0
    if largest * len(values) < 2**63:
        return int(values.sum() if weights is None else values @ weights)
    return sum(math.prod(products) for products in zip(*(array.tolist() for array in factors), strict=True))


def columns_from(records: Iterable[StepRecord], *, is_warmup: bool = False) -> StepColumns:
    """The columns of the ``records`` of the load, or of those of the warm-up."""
    steps = [record for record in records if record.is_warmup == is_warmup]
    values = zip(*map(msgspec.structs.astuple, steps), strict=True)
    fields = dict(zip(StepRecord.__struct_fields__, values, strict=True)) if steps else {}
    optionals = {name: fields[name] for name in OPTIONAL if steps and fields[name].count(None) < len(steps)}
    sections: tuple[Mapping[str, int], ...] = fields.get("sections_ns", ())
    names = sorted(set[str]().union(*sections))
    return StepColumns(
        start_ns=_integers(fields.get("start_ns", ())),
        dur_ns=_integers(fields.get("dur_ns", ())),
        num_seqs=_integers(fields.get("num_seqs", ())),
        phase=np.array([PHASES.index(phase) for phase in fields.get("phase", ())], dtype=np.uint8),
        clocks=tuple(sorted(set(fields.get("clock", ())))),
        optionals=MappingProxyType(
            {name: np.array(column, dtype=np.float64) for name, column in optionals.items()}
        ),
        section_ns=MappingProxyType({n: _integers([times.get(n, 0) for times in sections]) for n in names}),
        has_section=MappingProxyType({n: np.array([n in times for times in sections], dtype=bool) for n in names}),
        accepted_by_position=_by_position(fields.get(ACCEPTED_BY_POSITION, ())),
    )


def _by_position(accepted: Sequence[tuple[int, ...] | None]) -> Floats | None:
    num_positions = max((len(counts or ()) for counts in accepted), default=0)
    padded = [(*(counts or ()), *[None] * (num_positions - len(counts or ()))) for counts in accepted]
    return by_position([np.array(column, dtype=np.float64) for column in zip(*padded, strict=True)])


def _integers(values: Sequence[int]) -> Integers:
    return np.array(values, dtype=np.int64)
