"""The steps of a run as columns of numbers: a log may be too long to handle step by step."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.errors import RecordError
from benchctl.records.files import damaged_line, line_blocks, records_in
from benchctl.records.schema import Clock, StepPhase, StepRecord
from benchctl.untrusted.files import DECODING_ERRORS

Integers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
_Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

PHASES: Final[tuple[StepPhase, ...]] = get_args(StepPhase)
CLOCKS: Final[tuple[Clock, ...]] = get_args(Clock)
_ACCEPTED: Final = "accepted_by_position"
OPTIONAL: Final = tuple(
    field.name for field in msgspec.structs.fields(StepRecord) if field.default is None and field.name != _ACCEPTED
)
"""The counts and flags of a step that an engine may leave out."""
SECTION_PREFIX: Final = "sections_ns."
POSITION_PREFIX: Final = f"{_ACCEPTED}."
_NUMBERS: Final = ("start_ns", "dur_ns", "num_seqs", "is_warmup")
_NUMBERS_OF: Final = attrgetter(*_NUMBERS, *OPTIONAL)
_MOST_COLUMNS: Final = 1 << 10
"""Sections and other values of the steps of a log: each is a column of all its steps."""
_MOST_FORMS: Final = 1 << 8
_SPACED: Final = bytes.maketrans(b":,\n", b"   ")
_NO_NUMBER: Final = bytes(set(range(256)) - set(b"0123456789:,\n"))


@dataclass(frozen=True, slots=True, eq=False)
class StepColumns:
    """Steps of one run, of its load or of its warm-up, in the order of their log; each array has one value a step.

    ``arrays`` holds whole numbers by name, each array in as few bytes as its values need; what is read of it has
    64 bits and is made on access. A clock or phase is its index in ``CLOCKS`` or ``PHASES``. Sections and positions
    of drafts have a name each, after ``SECTION_PREFIX`` and ``POSITION_PREFIX``. -1 stands for a value that a step
    does not have; without an array, no step has it.
    """

    arrays: Mapping[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(self.arrays["dur_ns"])

    @property
    def start_ns(self) -> Integers:
        return self.arrays["start_ns"].astype(np.int64)

    @property
    def dur_ns(self) -> Integers:
        return self.arrays["dur_ns"].astype(np.int64)

    @property
    def num_seqs(self) -> Integers:
        return self.arrays["num_seqs"].astype(np.int64)

    @property
    def clocks(self) -> tuple[Clock, ...]:
        """The clocks that occur, each once, sorted."""
        return tuple(sorted(CLOCKS[index] for index in np.unique(self.arrays["clock"])))

    @property
    def section_ns(self) -> dict[str, Integers]:
        """Time of each section that any step has, by name in sorted order; 0 in steps without it."""
        return {name: np.maximum(values, 0).astype(np.int64) for name, values in self._sections()}

    @property
    def has_section(self) -> dict[str, Flags]:
        """The steps that have each section."""
        return {name: values >= 0 for name, values in self._sections()}

    def _sections(self) -> list[tuple[str, npt.NDArray[Any]]]:
        names = sorted(name for name in self.arrays if name.startswith(SECTION_PREFIX))
        return [(name.removeprefix(SECTION_PREFIX), self.arrays[name]) for name in names]

    @property
    def accepted_by_position(self) -> Floats | None:
        """Accepted drafts, a row for each step and a column for each position of a draft; a row of NaN where the
        step does not tell, None when no step does.
        """
        columns = [values for name, values in self.arrays.items() if name.startswith(POSITION_PREFIX)]
        if not columns:
            return None
        accepted: Floats = np.stack(columns, axis=1).astype(np.float64)
        accepted[accepted < 0] = 0  # beyond the end of a short draft
        accepted[columns[0] < 0] = np.nan
        return accepted

    def optional(self, name: str) -> Floats | None:
        """A field of ``OPTIONAL`` with NaN for unknown, 0 and 1 for no and yes; None when no step has it.

        ValueError for another name.
        """
        if name not in OPTIONAL:
            raise ValueError(f"{name!r} is not an optional field of a step; those are {', '.join(OPTIONAL)}")
        values = self.arrays.get(name)
        return None if values is None else np.where(values < 0, np.nan, values.astype(np.float64))

    def total(self, name: str, where: Flags | None = None) -> int | None:
        """Sum of an optional field over the steps of ``where``; None without steps, or if one of them lacks it."""
        values = self.arrays.get(name)
        if values is None:
            return None
        summands = values if where is None else values[where]
        return None if not len(summands) or summands.min() < 0 else int(summands.sum())

    def known_values(self, name: str) -> Floats:
        """An optional field in the steps that have it."""
        values = self.arrays.get(name)
        return np.empty(0) if values is None else values[values >= 0].astype(np.float64)

    def in_phase(self, phase: StepPhase) -> Flags:
        """True for each step of this phase."""
        is_phase: Flags = np.equal(self.arrays["phase"], PHASES.index(phase))
        return is_phase


def exact_sum(values: Integers, weights: Integers | None = None) -> int:
    """Sum of ``values``, or of their products with ``weights``, however large it is."""
    factors = [array for array in (values, weights) if array is not None]
    bounds = [int(np.bitwise_or.reduce(array)) for array in factors]  # no value is larger; below 0 where one is
    if min(bounds) >= 0 and math.prod(bounds) * len(values) < 2**63:
        return int(values.sum() if weights is None else values @ weights)
    return sum(math.prod(products) for products in zip(*(array.tolist() for array in factors), strict=True))


def columns_with(arrays: Mapping[str, npt.NDArray[Any]]) -> StepColumns:
    """The columns of these arrays, without those of values that no step has."""
    present = {
        name: values
        for name, values in arrays.items()
        if name in ("start_ns", "dur_ns", "num_seqs", "phase", "clock") or (values >= 0).any()
    }
    return StepColumns(present)


def columns_from(records: Sequence[StepRecord], *, is_warmup: bool = False) -> StepColumns:
    """The columns of the ``records`` of the load, or of those of the warm-up."""
    return _separated([_arrays_of(records)])[is_warmup]


def joined(pieces: Sequence[StepColumns]) -> StepColumns:
    """The steps of several loads, one after the other."""
    return pieces[0] if len(pieces) == 1 else StepColumns(_joined([piece.arrays for piece in pieces]))


Steps: TypeAlias = tuple[StepColumns, StepColumns, RecordError | None]


def read_steps(path: Path, *, within: Path) -> Steps:
    """The steps of the load and of the warm-up up to the first damaged line of a log, and the error of that line.

    No link leads to the file from ``within``. A missing file has no steps.
    """
    decoder, blocks = msgspec.json.Decoder(StepRecord), list[_Arrays]()
    names, num_lines, damage = set[str](), 0, None
    try:
        for lines in line_blocks(path, within=within):
            num_here = int(np.count_nonzero(np.frombuffer(lines, np.uint8) == ord("\n")))  # a faster ``count``
            try:
                arrays = _read_forms(lines, num_here, decoder.decode)
            except DECODING_ERRORS:
                records, damage = records_in(lines, decoder, path, num_lines)
                arrays = _arrays_of(records)
            blocks.append(arrays)
            names |= arrays.keys()
            num_lines += num_here
            if len(names) > _MOST_COLUMNS:
                raise damaged_line(path, num_lines, f"the steps so far have {len(names)} different sections")
            if damage is not None:
                break
    except RecordError as error:
        damage = error
    return *_separated(blocks or [_arrays_of(())]), damage


class _Form(NamedTuple):
    """The common part of lines of a log that differ in their digits alone."""

    names: tuple[str, ...]
    """The columns of the numbers in a line, in their order; empty for one without a column."""
    others: _Arrays
    """The value of each column whose values are words."""
    template: bytes
    """A line with ``%d`` in place of each number."""


_FORMS: Final[dict[bytes, _Form]] = {}
"""The forms of lines read so far by their text without digits."""


def _form_of(line: bytes, decode: Callable[[bytes], StepRecord]) -> _Form:
    """The form of a line.

    Raises one of ``DECODING_ERRORS`` for anything but a step whose only digits are those of whole numbers.
    """
    others, numbers = _arrays_of([decode(line)]), dict[str, Any]()
    for name, value in msgspec.json.decode(line).items():
        if name == "sections_ns":
            numbers |= {SECTION_PREFIX + section: duration for section, duration in value.items()}
        elif name == _ACCEPTED:
            numbers |= {f"{POSITION_PREFIX}{i}": count for i, count in enumerate(value or (), start=1)}
        elif type(value) is int:
            numbers[name] = value
    if _numbers_in(line).tolist() != list(numbers.values()):
        raise ValueError("not all digits are those of whole numbers")
    names = tuple(name if others.pop(name, None) is not None else "" for name in numbers)
    return _Form(names, others, re.sub(rb"\d+", b"%d", line.replace(b"%", b"%%")))


def _numbers_in(lines: bytes) -> Integers:
    """Every run of digits between punctuation."""
    return np.fromstring(lines.translate(_SPACED, _NO_NUMBER), np.int64, sep=" ")


def _read_forms(lines: bytes, num_lines: int, decode: Callable[[bytes], StepRecord]) -> _Arrays:
    """The values of the steps in some lines by name, in half the time that their records take.

    Lines that differ in their digits alone are understood once. Raises one of ``DECODING_ERRORS`` for any others
    than whole lines of steps, each of which has its numbers within the limits of its record.
    """
    shapes = lines.translate(None, b"0123456789")
    *shape_of, rest = shapes[: shapes.index(b"\n") + 1].split(b"\n")
    if shapes == (shape_of[0] + b"\n") * num_lines:
        shape_of *= num_lines
    else:
        *shape_of, rest = shapes.split(b"\n")
    if rest:
        raise ValueError("the last line is cut off")
    if len(_FORMS) > _MOST_FORMS:
        _FORMS.clear()
    indexes = {shape: index for index, shape in enumerate(dict.fromkeys(shape_of))}
    for shape in indexes.keys() - _FORMS.keys():
        _FORMS[shape] = _form_of(lines.split(b"\n")[shape_of.index(shape)], decode)
    forms = [_FORMS[shape] for shape in indexes]
    form_of = np.fromiter(map(indexes.__getitem__, shape_of), np.intp, num_lines)
    numbers, widths = _numbers_in(lines), np.array([len(form.names) for form in forms])[form_of]
    if len(numbers) != widths.sum():
        raise ValueError("a line has more numbers than its form, or fewer")
    begins, arrays = widths.cumsum() - widths, dict[str, Integers]()
    for index, form in enumerate(forms):
        steps = np.flatnonzero(form_of == index)
        values = numbers[begins[steps, None] + np.arange(len(form.names))]
        decode(form.template % tuple(values.max(axis=0).tolist()))  # none is above its limit if these are not
        for name, column in (*zip(form.names, values.T, strict=True), *form.others.items()):
            arrays.setdefault(name, np.full(num_lines, -1, np.int64))[steps] = column
    arrays.pop("", None)
    return {name: _narrowed(values) for name, values in arrays.items()}


def _arrays_of(records: Sequence[StepRecord]) -> _Arrays:
    """The values of some steps by name, those of the load and of the warm-up."""
    drafts = [record.accepted_by_position or () for record in records]
    num_positions = max(map(len, drafts), default=0)
    sections = sorted(set(chain.from_iterable(record.sections_ns for record in records)))
    rows = [
        (
            CLOCKS.index(record.clock),
            PHASES.index(record.phase),
            *_NUMBERS_OF(record),
            *draft,
            *repeat(None, num_positions - len(draft)),
            *map(record.sections_ns.get, sections),
        )
        for record, draft in zip(records, drafts, strict=True)
    ]
    numbers = [-1 if number is None else number for number in chain.from_iterable(rows)]
    positions = (f"{POSITION_PREFIX}{number}" for number in range(1, num_positions + 1))
    names = ["clock", "phase", *_NUMBERS, *OPTIONAL, *positions, *(SECTION_PREFIX + name for name in sections)]
    columns = np.array(numbers, np.int64).reshape(-1, len(names)).T
    arrays = {name: _narrowed(values) for name, values in zip(names, columns, strict=True)}
    return {name: values for name, values in arrays.items() if name not in OPTIONAL or (values >= 0).any()}


def _narrowed(values: Integers) -> npt.NDArray[Any]:
    """The values in as few bytes as they need."""
    least = min(-1 - int(values.max(initial=0)), int(values.min(initial=0)))
    return values.astype(np.min_scalar_type(least))


def _joined(blocks: Sequence[Mapping[str, npt.NDArray[Any]]]) -> _Arrays:
    """The columns of blocks of steps that follow one another; -1 where a block lacks one."""
    arrays = {}
    for name in dict.fromkeys(chain.from_iterable(blocks)):
        pieces = [block.get(name, np.full(len(block["dur_ns"]), -1, dtype=np.int8)) for block in blocks]
        arrays[name] = np.concatenate(pieces)
    return arrays


def _separated(blocks: Sequence[Mapping[str, npt.NDArray[Any]]]) -> tuple[StepColumns, StepColumns]:
    """The columns of the load and of the warm-up from blocks of steps that follow one another."""
    arrays = _joined(blocks)
    is_warmup = arrays.pop("is_warmup") == 1
    load = {name: values[~is_warmup] for name, values in arrays.items()} if is_warmup.any() else arrays
    return columns_with(load), columns_with({name: values[is_warmup] for name, values in arrays.items()})
