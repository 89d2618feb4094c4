"""Laws between the fields of a record that hold whatever was measured; those of single fields are their types."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from benchctl.records.record import Count, DurationNs, MomentNs
from benchctl.records.request import ChoiceRecord, RequestRecord
from benchctl.units import NS_PER_MS, NS_PER_S

_SLACK_NS: Final = {"kernel": NS_PER_S, "loop": NS_PER_MS, "whole": NS_PER_MS}
"""Disorder that counts as none, by the source of the stamps: those of the kernel are mapped from the wall clock,
and where it was set some of them are times of a read."""
LEAST_SLACK_NS: Final = min(_SLACK_NS.values())


def request_problem(record: RequestRecord) -> str | None:
    """The law that a request breaks: it is sent, then its chunks come one after the other, then it is done."""
    slack_ns = _SLACK_NS[record.stamps]
    if is_after(record.sent_ns, record.done_ns, 0):
        return f"done_ns is {record.done_ns}, before sent_ns, {record.sent_ns}"
    for choice in record.choices:
        if problem := _length_problem(choice) or _range_problem(choice):
            return problem
        times: Sequence[int] = choice.chunk_ns  # an array in records from a copy, which was checked as a whole
        if not times:
            continue
        if is_after(record.sent_ns, times[0], slack_ns):
            return f"chunk_ns begins with {times[0]}, before sent_ns, {record.sent_ns}"
        if is_after(times[-1], record.done_ns, slack_ns):
            return f"chunk_ns ends with {times[-1]}, after done_ns, {record.done_ns}"
        if isinstance(times, tuple) and (disorder := _first_disorder(times, slack_ns)) is not None:
            return f"chunk_ns has {disorder[1]} after {disorder[0]}"
    return None


def is_after(first_ns: int | None, second_ns: int | None, slack_ns: int) -> bool:
    """True if both times are known and the first is more than ``slack_ns`` after the second."""
    return first_ns is not None and second_ns is not None and first_ns - second_ns > slack_ns


def _first_disorder(times: Sequence[int], slack_ns: int) -> tuple[int, int] | None:
    return next(((earlier, later) for earlier, later in pairwise(times) if earlier - later > slack_ns), None)


def _length_problem(choice: ChoiceRecord) -> str | None:
    """The field that has not one number for each chunk."""
    for name in ("chunk_late_ns", "chunk_tokens", "chunk_chars"):
        numbers = getattr(choice, name)
        if numbers and len(numbers) != len(choice.chunk_ns):
            return f"{name} has {len(numbers)} numbers for {len(choice.chunk_ns)} chunks"
    return None


def _range_problem(choice: ChoiceRecord) -> str | None:
    """The field of the chunks with a number that it cannot have; those from a copy were checked as a whole."""
    for name, law in CHUNK_LAWS.items():
        numbers: Sequence[int] | None = getattr(choice, name)
        if numbers and isinstance(numbers, tuple) and not law.least <= min(numbers) <= max(numbers) <= law.most:
            return f"{name} has numbers from {min(numbers)} to {max(numbers)}"
    return None


class Law(NamedTuple):
    """The least and the largest value of a field."""

    least: int
    most: int


def law_of(kind: type[msgspec.Struct], field: str) -> Law:
    """The law of a field of whole numbers, one or several in each record: that of its type, 0 and 1 for a flag."""
    types = {each.name: each.type for each in msgspec.structs.fields(kind)}
    return _law(msgspec.inspect.type_info(types[field]))


def _law(info: msgspec.inspect.Type) -> Law:
    if isinstance(info, msgspec.inspect.IntType):
        return Law(-(1 << 63) if info.ge is None else info.ge, (1 << 63) - 1 if info.le is None else info.le)
    if isinstance(info, msgspec.inspect.BoolType):
        return Law(0, 1)
    if isinstance(info, msgspec.inspect.UnionType):
        return next(_law(each) for each in info.types if not isinstance(each, msgspec.inspect.NoneType))
    if isinstance(info, msgspec.inspect.DictType):
        return _law(info.value_type)
    if isinstance(info, msgspec.inspect.VarTupleType):
        return _law(info.item_type)
    raise TypeError(f"{info} holds no whole numbers")


CHUNK_LAWS: Final = {
    "chunk_ns": _law(msgspec.inspect.type_info(MomentNs)),
    "chunk_late_ns": _law(msgspec.inspect.type_info(DurationNs)),
    "chunk_tokens": _law(msgspec.inspect.type_info(Count)),
    "chunk_chars": _law(msgspec.inspect.type_info(Count)),
}
"""Of the fields with a number for each chunk: constraints in their types would make decoding 6 % slower."""
