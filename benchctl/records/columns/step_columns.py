"""The steps of a run as columns of numbers, for logs that are too long to handle step by step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from benchctl.records.columns.step_table import (
    CLOCKS,
    OPTIONAL,
    PHASES,
    POSITION_PREFIX,
    SECTION_PREFIX,
    StepTable,
    table_of,
)
from benchctl.records.step import Clock, StepPhase, StepRecord

A = TypeVar("A", bound=npt.NDArray[Any])

Integers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]


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


def exact_sum(values: Integers, weights: Integers | None = None) -> int:
    """Sum of ``values``, or of their products with ``weights``, however large it is."""
    factors = [array for array in (values, weights) if array is not None]
    largest = math.prod(max(-int(array.min()), int(array.max())) for array in factors) if len(values) else 0
    if largest * len(values) < 2**63:
        return int(values.sum() if weights is None else values @ weights)
    return sum(math.prod(products) for products in zip(*(array.tolist() for array in factors), strict=True))


def columns_from(records: Sequence[StepRecord], *, is_warmup: bool = False) -> StepColumns:
    """The columns of the ``records`` of the load, or of those of the warm-up."""
    return columns_of(table_of(records), is_warmup=is_warmup)


def columns_of(table: StepTable, *, is_warmup: bool = False) -> StepColumns:
    """The columns of the steps of the load, or of those of the warm-up, each made on access."""
    arrays, rows = table.arrays, table.rows(is_warmup=is_warmup)
    has = {name: flags for name in table.names if (flags := table.is_known(name)[rows]).any()}
    sections = {name.removeprefix(SECTION_PREFIX): name for name in has if name.startswith(SECTION_PREFIX)}

    def floats(name: str) -> Floats:
        values = arrays[name][rows].astype(np.float64)
        values[~has[name]] = np.nan
        return values

    def integers(name: str) -> Integers:
        return arrays[name][rows].astype(np.int64)

    return StepColumns(
        start_ns=integers("start_ns"),
        dur_ns=integers("dur_ns"),
        num_seqs=integers("num_seqs"),
        phase=arrays["phase"][rows],
        clocks=tuple(sorted(CLOCKS[index] for index in np.unique(arrays["clock"][rows]))),
        optionals=_OnAccess([name for name in OPTIONAL if name in has], floats),
        section_ns=_OnAccess(sorted(sections), lambda name: integers(sections[name])),
        has_section=_OnAccess(sorted(sections), lambda name: has[sections[name]]),
        accepted_by_position=_by_position(
            [floats(name) for name in has if name.startswith(POSITION_PREFIX)],
        ),
    )


def _by_position(columns: Sequence[Floats]) -> Floats | None:
    """A row for each step from a column for each position, which has NaN where a step names none; None without
    columns.
    """
    if not columns:
        return None
    accepted = np.stack(columns, axis=1)
    accepted[np.isnan(accepted) & ~np.isnan(accepted[:, :1])] = 0  # shorter drafts have none accepted there
    return accepted


class _OnAccess(Mapping[str, A]):
    """Columns by name, each made on access: few readers need all of them."""

    def __init__(self, names: Sequence[str], column: Callable[[str], A]) -> None:
        self._names = dict.fromkeys(names)
        self._column = column

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> A:
        if name not in self._names:
            raise KeyError(name)
        return self._column(name)
