"""The steps of a run as columns of numbers: a log may be too long to handle step by step."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, repeat
from multiprocessing.connection import Connection, Pipe
from operator import attrgetter
from pathlib import Path
from struct import Struct
from types import GenericAlias
from typing import Any, Final, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.errors import RecordError
from benchctl.records.files import damaged_line, line_blocks, records_in
from benchctl.records.schema import MOST_SECTIONS, Clock, Count, DurationNs, StepPhase, StepRecord
from benchctl.untrusted.files import DECODING_ERRORS, is_file

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
_LONG_BYTES: Final = 64 << 20
"""Logs that take several times as long to read as a process takes to start."""
_SECOND_PROCESS: Final = f"import gc; gc.disable(); from {__name__} import answer_reader; answer_reader()"
"""Without the garbage collector: none of the records is part of a cycle, and to search them takes time."""


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
        is_phase: Flags = np.equal(self.arrays["phase"], PHASES.index(phase))
        return is_phase


def exact_sum(values: Integers, weights: Integers | None = None) -> int:
    """Sum of ``values``, or of their products with ``weights``, however large it is."""
    factors = [array for array in (values, weights) if array is not None]
    largest = math.prod(max(-int(array.min()), int(array.max())) for array in factors) if len(values) else 0
    if largest * len(values) < 2**63:
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


Steps: TypeAlias = tuple[StepColumns, StepColumns, RecordError | None]


def read_steps(path: Path, *, within: Path) -> Steps:
    """The steps of the load and of the warm-up up to the first damaged line of a log, and the error of that line.

    No link leads to the file from ``within``. A missing file has no steps.
    """
    decoder, read_uniform = msgspec.json.Decoder(StepRecord), _uniform_reader(frozenset())
    blocks, names, num_lines = [], set[str](), 0
    damage = None
    try:
        for lines in line_blocks(path, within=within):
            num_here = int(np.count_nonzero(np.frombuffer(lines, np.uint8) == ord("\n")))  # a faster ``count``
            arrays = read_uniform(lines, num_here)
            if arrays is None:
                records, damage = records_in(lines, decoder, path, num_lines)
                arrays = _arrays_of(records)
                names |= arrays.keys()
                with suppress(ValueError):  # of sections that no struct can have
                    read_uniform = _uniform_reader(frozenset(names))
            blocks.append(arrays)
            num_lines += num_here
            if len(names) > _MOST_COLUMNS:
                raise damaged_line(path, num_lines, f"the steps so far have {len(names)} different sections")
            if damage is not None:
                break
    except RecordError as error:
        damage = error
    return *_separated(blocks or [_arrays_of(())]), damage


@contextmanager
def steps_reader(logs: Sequence[Path], *, within: Path) -> Iterator[Callable[..., Steps]]:
    """Yields ``read_steps`` for these logs, which are read in this order.

    Where they are long, a second process begins with the last of them meanwhile. What it does not read, for
    whatever reason, this process reads. It ends with the context.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_long = sum(log.stat().st_size for log in logs if is_file(log, within=within)) >= _LONG_BYTES
    second = _second_process() if is_long and num_cores > 1 else None
    if second is None:
        yield read_steps
        return
    process, ours = second
    with process, ours, ThreadPoolExecutor(1) as thread:

        def ask(log: Path) -> Any:
            ours.send({"path": log, "within": within})
            return ours.recv()

        answers: dict[Path, Future[Steps]] = {log: thread.submit(ask, log) for log in reversed(logs)}

        def read(path: Path, *, within: Path) -> Steps:
            answer = answers[path]
            is_ours = answer.cancel() or answer.exception() is not None
            return read_steps(path, within=within) if is_ours else answer.result()

        try:
            yield read
        finally:
            process.kill()


def _second_process() -> tuple["subprocess.Popen[bytes]", Connection] | None:
    """A process that reads logs, and the connection to it; None where no process can be started."""
    ours, theirs = Pipe()
    with theirs:
        try:
            process = subprocess.Popen(
                (sys.executable, "-P", "-c", _SECOND_PROCESS),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # it is told of interrupts as well
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        except OSError:
            ours.close()
            return None
    return process, ours


def answer_reader() -> None:
    """The second process of ``steps_reader``: reads the logs that it is asked for until nobody asks any more."""
    with Connection(sys.stdin.fileno()) as connection, suppress(EOFError, OSError):
        while True:
            connection.send(read_steps(**connection.recv()))


@lru_cache(maxsize=32)
def _uniform_reader(names: frozenset[str]) -> Callable[[bytes, int], _Arrays | None]:
    """A reader of lines whose steps have no other values than these, in half the time that their records take.

    It takes the number of lines beside them, and returns None for any other lines, such as damaged ones.
    ValueError where no struct can have these sections: of a quote in a name, or of more than a step may have.
    """
    optional = [name for name in OPTIONAL if name in names]
    num_positions = sum(name.startswith(POSITION_PREFIX) for name in names)
    sections = sorted(name.removeprefix(SECTION_PREFIX) for name in names if name.startswith(SECTION_PREFIX))
    if len(sections) > MOST_SECTIONS:
        raise ValueError(f"no step has {len(sections)} sections")
    # Not searched by the garbage collector; what a step does not have is -1 from the start.
    closed = partial(msgspec.defstruct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True)
    keys = {f"s{i}": name for i, name in enumerate(sections)}
    section_type = closed("Sections", [(key, DurationNs, -1) for key in keys], rename=keys)
    types = {field.name: field.type for field in msgspec.structs.fields(StepRecord)}
    step_fields: list[Any] = [
        *((name, types[name]) for name in ("step", "start_ns", "dur_ns", "clock", "phase", "num_seqs")),
        ("is_warmup", bool, False),
        *((name, get_args(types[name])[0], -1) for name in optional),  # the type beside None
        (_ACCEPTED, GenericAlias(tuple, (Count,) * num_positions), (-1,) * num_positions),
        ("sections_ns", section_type, section_type()),
    ]
    decode: Callable[[bytes], list[Any]] = msgspec.json.Decoder(closed("Step", step_fields)).decode_lines
    columns = _names(optional, num_positions, sections)
    numbers_of, pack = attrgetter(*_NUMBERS, *optional), Struct(f"{len(columns)}q").pack

    def read(lines: bytes, num_lines: int) -> _Arrays | None:
        steps = []
        with suppress(*DECODING_ERRORS):
            steps = decode(lines)
        if not steps or len(steps) != num_lines:
            return None
        rows = [
            pack(
                CLOCKS.index(step.clock),
                PHASES.index(step.phase),
                *numbers_of(step),
                *step.accepted_by_position,
                *msgspec.structs.astuple(step.sections_ns),
            )
            for step in steps
        ]
        return _columns(columns, np.frombuffer(b"".join(rows), np.int64))

    return read


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
    arrays = _columns(_names(OPTIONAL, num_positions, sections), np.array(numbers, np.int64))
    return {name: values for name, values in arrays.items() if name not in OPTIONAL or (values >= 0).any()}


def _names(optional: Sequence[str], num_positions: int, sections: Sequence[str]) -> list[str]:
    """The names of the numbers of a step in their order."""
    positions = (f"{POSITION_PREFIX}{number}" for number in range(1, num_positions + 1))
    return ["clock", "phase", *_NUMBERS, *optional, *positions, *(SECTION_PREFIX + name for name in sections)]


def _columns(names: Sequence[str], numbers: Integers) -> _Arrays:
    """The columns of these names from the numbers of one step after the other, each in as few bytes as it needs."""
    columns = np.ascontiguousarray(numbers.reshape(-1, len(names)).T)
    limits = -1 - np.maximum(columns.max(axis=1, initial=0), -1 - columns.min(axis=1, initial=0))
    return {
        name: values.astype(np.min_scalar_type(limit))
        for name, values, limit in zip(names, columns, limits, strict=True)
    }


def _separated(blocks: Sequence[Mapping[str, npt.NDArray[Any]]]) -> tuple[StepColumns, StepColumns]:
    """The columns of the load and of the warm-up from blocks of steps that follow one another."""
    arrays = {}
    for name in dict.fromkeys(chain.from_iterable(blocks)):
        pieces = [block.get(name, np.full(len(block["dur_ns"]), -1, dtype=np.int8)) for block in blocks]
        arrays[name] = np.concatenate(pieces)
    is_warmup = arrays.pop("is_warmup") == 1
    load = {name: values[~is_warmup] for name, values in arrays.items()}
    return columns_with(load), columns_with({name: values[is_warmup] for name, values in arrays.items()})
