"""A copy of a long ``requests.jsonl`` with its numbers as arrays: later readers need not decode the lines again.

Most of such a file are the numbers of its chunks (``CHUNK_FIELDS``). The copy (``log_copy``) has one array for
each of these fields, with the values of all choices in a row, and the records without them as JSON. Whoever reads
the file first makes it.

In records that were read here these fields are arrays instead of tuples: the same values in an eighth of the
memory, and sequences as well, but not equal to tuples and not to be encoded.
"""

import hashlib
import io
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

import msgspec
import numpy as np

from benchctl.errors import RecordError
from benchctl.records.columns.log_copy import copy_bytes, read_copy, write_copy
from benchctl.records.columns.tensor_file import Numbers, in_fewest_bytes, tensors_of
from benchctl.records.files import open_log
from benchctl.records.jsonl import decode_lines, encode
from benchctl.records.laws import CHUNK_LAWS, LEAST_SLACK_NS
from benchctl.records.request import ChoiceRecord, RequestRecord
from benchctl.records.run import FileDigest
from benchctl.untrusted.decoding import DECODING_ERRORS
from benchctl.untrusted.files import lines_of

if TYPE_CHECKING:
    from hashlib import _Hash

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
