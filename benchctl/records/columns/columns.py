"""The steps of a log as a compact table of whole numbers, from which columns are made on demand.

The steps of a run as columns of numbers, for logs that are too long to handle step by step.
The copy of a long log as arrays: a safetensors file beside it that later readers take instead of the lines.
A copy of a long ``requests.jsonl`` with its numbers as arrays: later readers need not decode the lines again.
"""

import hashlib
import io
import math
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise, repeat
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, get_args, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.errors import RecordError
from benchctl.records.columns.tensor_file import Numbers, in_fewest_bytes, tensor_bytes, tensors_of
from benchctl.records.files import decode_lines, encode, open_log, write_bytes_atomic
from benchctl.records.loaded import CHUNK_LAWS, LEAST_SLACK_NS, Law, law_of
from benchctl.records.record import ChoiceRecord, FileDigest, RequestRecord
from benchctl.records.schema import Clock, StepPhase, StepRecord
from benchctl.untrusted.files import lines_of, open_file, read_file
from benchctl.untrusted.limits import LOG_BYTES
from benchctl.untrusted.reading import DECODING_ERRORS

if TYPE_CHECKING:
    from hashlib import _Hash


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


_UNUSABLE: Final[tuple[type[Exception], ...]] = (OSError, RecordError, *DECODING_ERRORS)


def copy_path(log: Path) -> Path:
    """Path of the copy of a log such as ``steps.jsonl``."""
    return log.with_suffix(".safetensors")


def read_copy(log: Path, *, version: str, recorded: FileDigest | None, within: Path) -> dict[str, Numbers] | None:
    """The arrays of the copy; None without one of this version and of the log's present content.

    ``recorded``: digest of the log when its run ended; trusted if the log still has that size and time.
    """
    try:
        tensors, metadata = tensors_of(read_file(copy_path(log), within=within, max_bytes=LOG_BYTES))
        log_sha256 = _sha256(log, recorded, within)
        is_current = metadata.get("version") == version and metadata.get(_key(log)) == log_sha256
    except _UNUSABLE:  # a copy that cannot be read: the log can
        return None
    return tensors if is_current else None


def copy_bytes(log: Path, tensors: Mapping[str, Numbers], *, version: str, log_sha256: str) -> bytes:
    """The content of a copy of the log with this SHA-256."""
    return tensor_bytes(tensors, {"version": version, _key(log): log_sha256})


def write_copy(log: Path, content: bytes, *, within: Path) -> None:
    """Put a copy beside its log, unless the directory cannot be written: no reader depends on it."""
    with suppress(OSError, RecordError):
        write_bytes_atomic(copy_path(log), content, within=within)


def _key(log: Path) -> str:
    return f"{log.stem}_sha256"


def _sha256(path: Path, recorded: FileDigest | None, within: Path) -> str:
    with open_file(path, within=within) as file:
        status = os.fstat(file.fileno())
        if recorded is not None and (status.st_size, status.st_mtime_ns) == (
            recorded.size_bytes,
            recorded.mtime_ns,
        ):
            return recorded.sha256
        return hashlib.file_digest(file, "sha256").hexdigest()


_VERSION: Final = "1"
"""Version of the copy; those of another one are not read."""
CHUNK_FIELDS: Final = {
    field.name: field.default
    for field in msgspec.structs.fields(ChoiceRecord)
    if tuple in {get_origin(field.type), *map(get_origin, get_args(field.type))}
}
"""The fields of a choice that hold a number for each chunk, with the value that is left out of the JSON."""
_ARRIVALS: Final = "chunk_ns"
_RECORDS: Final = "records"
_LENGTHS: Final = ".lengths"
"""Suffix of a field's name: the number of values of each choice, in the order of the file; -1 for None."""
_TYPE_CODES: Final = {"uint8": "B", "uint16": "H", "int32": "i", "int64": "q"}


def read_requests(
    requests: Path, *, recorded: FileDigest | None = None, writes_copy: bool, within: Path | None = None
) -> tuple[RequestRecord, ...] | None:
    """The records of a file, from its copy if that fits; None if a line is damaged or a number too large.

    ``recorded``: digest of the file when its run ended; trusted if the file still has that size and time.
    ``writes_copy``: the file is complete, so a copy is worth writing. No link leads to the file from ``within``, by
    default its folder.
    """
    root = within or requests.parent
    copied = read_copy(requests, version=_VERSION, recorded=recorded, within=root)
    if copied is not None:
        with suppress(KeyError, *DECODING_ERRORS):  # arrays that do not fit together: the lines do
            return _unpacked(copied)
    try:
        content = _packed(requests, root)
    except (RecordError, OverflowError):  # the reader of lines reports it
        return None
    try:
        records = _unpacked(tensors_of(content)[0])
    except ValueError:  # times in disorder: the reader of lines reports it
        return None
    if writes_copy:
        write_copy(requests, content, within=root)
    return records


def _packed(requests: Path, within: Path) -> bytes:
    """The copy of a file. Raises RecordError at a damaged line, OverflowError for a number beyond 64 bits."""
    digest, records = hashlib.sha256(), bytearray()
    values = {name: array("q") for name in CHUNK_FIELDS}
    lengths = {name: array("i") for name in CHUNK_FIELDS}
    with open_log(requests, within=within) or io.BytesIO() as file:
        for record in decode_lines(_digested(lines_of(file, requests), digest), requests, RequestRecord):
            for choice in record.choices:
                for name, default in CHUNK_FIELDS.items():
                    numbers = getattr(choice, name)
                    lengths[name].append(-1 if numbers is None else len(numbers))
                    values[name].extend(numbers or ())
                    msgspec.structs.force_setattr(choice, name, default)
            records += encode(record) + b"\n"
    tensors: dict[str, Numbers] = {_RECORDS: np.asarray(memoryview(records))}
    for name in CHUNK_FIELDS:
        tensors[name] = in_fewest_bytes(np.asarray(values[name]))
        tensors[name + _LENGTHS] = np.asarray(lengths[name])
    return copy_bytes(requests, tensors, version=_VERSION, log_sha256=digest.hexdigest())


def _digested(lines: Iterable[bytes], digest: "_Hash") -> Iterator[bytes]:
    for line in lines:
        digest.update(line)
        yield line


def _unpacked(tensors: Mapping[str, Numbers]) -> tuple[RequestRecord, ...]:
    """The records with their numbers. Raises KeyError or ValueError if arrays are missing or inconsistent."""
    records = msgspec.json.Decoder(RequestRecord).decode_lines(tensors[_RECORDS].tobytes())
    choices = [choice for record in records for choice in record.choices]
    for name, default in CHUNK_FIELDS.items():
        lengths = tensors[name + _LENGTHS]
        if default is None and not len(lengths[lengths >= 0]):
            continue  # no choice has any: the records are right as they are
        _check_numbers(name, tensors[name], lengths)
        for choice, numbers in zip(choices, _pieces(tensors[name], lengths), strict=True):
            msgspec.structs.force_setattr(choice, name, numbers)
    return tuple(records)


def _check_numbers(name: str, values: Numbers, lengths: Numbers) -> None:
    """Raise ValueError for numbers that the field cannot have, and for arrivals that do not ascend."""
    law = CHUNK_LAWS[name]
    if len(values) and not (law.least <= int(values.min()) and int(values.max()) <= law.most):
        raise ValueError(f"{name} has numbers from {values.min()} to {values.max()}")
    if name == _ARRIVALS and len(values) > 1:
        falls = np.diff(values.astype(np.int64, copy=False)) < -LEAST_SLACK_NS
        ends = np.cumsum(np.maximum(lengths, 0), dtype=np.int64)
        falls[ends[(ends > 0) & (ends < len(values))] - 1] = False  # from one choice to the next
        if falls.any():
            raise ValueError(f"{name} does not ascend")


def _pieces(values: Numbers, lengths: Numbers) -> "list[array[Any] | tuple[()] | None]":
    """The numbers of each choice; choices with the same small ones, as one token in each chunk, share them."""
    ends = np.cumsum(np.maximum(lengths, 0), dtype=np.int64).tolist()
    num_expected = ends[-1] if ends else 0
    if num_expected != len(values):
        raise ValueError(f"{num_expected} values are expected, and the array has {len(values)}")
    code = _TYPE_CODES[values.dtype.name]
    whole = array(code, values.tobytes())
    pieces = [whole[start:end] for start, end in pairwise([0, *ends])]  # each of just the size that it needs
    if code == "B":
        shared: dict[bytes, array[Any]] = {}
        pieces = [shared.setdefault(piece.tobytes(), piece) for piece in pieces]
    return [
        numbers or (None if length < 0 else ()) for numbers, length in zip(pieces, lengths.tolist(), strict=True)
    ]
