"""A long ``requests.jsonl``, whose numbers are kept beside it as arrays: lines are decoded once, and not each time.

Nearly all of such a file are the numbers of its chunks (``CHUNK_FIELDS``). The copy has one array for each of these
fields, with the values of all choices in a row, and the records without them as JSON. The file stays what was
measured: the copy counts only while the file has the SHA-256 that it names, and nothing is lost with it. Whoever
reads a file without a copy that fits makes one, where the directory can be written.

In records that were read here the fields are arrays and no tuples: the same values in an eighth of the memory,
sequences like them, but not equal to them and not to be encoded.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec
import numpy as np

from benchctl.errors import RecordError
from benchctl.records.columns.tensor_file import Numbers, in_fewest_bytes, tensor_bytes, tensors_of
from benchctl.records.jsonl import decode_lines, encode, write_bytes_atomic
from benchctl.records.request import ChoiceRecord, RequestRecord
from benchctl.records.run import FileDigest

if TYPE_CHECKING:
    from hashlib import _Hash

_VERSION: Final = "1"
"""Of what is made of a file here; another one's copies are not read."""
_OF_NUMBERS: Final = tuple[int, ...]
CHUNK_FIELDS: Final = {
    field.name: field.default
    for field in msgspec.structs.fields(ChoiceRecord)
    if _OF_NUMBERS in {field.type, *get_args(field.type)}
}
"""The fields of a choice that hold a number for each chunk, with the value that is left out of the JSON."""
_RECORDS: Final = "records"
_LENGTHS: Final = ".lengths"
"""Behind the name of a field: how many values each choice has, in the order of the file; -1 for None."""
_TYPE_CODES: Final = {"uint8": "B", "uint16": "H", "int32": "i", "int64": "q"}


def arrays_path(requests: Path) -> Path:
    """Where the copy of ``requests.jsonl`` is kept."""
    return requests.with_suffix(".safetensors")


def read_requests(
    requests: Path, *, recorded: FileDigest | None = None, keeps_copy: bool
) -> tuple[RequestRecord, ...] | None:
    """The records of a file, from its copy where one fits; None where a line is damaged, or a number too large.

    ``recorded``: what the file held when its run ended; believed where it still has that size and time.
    ``keeps_copy``: nothing more will be written to the file, so that a copy is worth keeping.
    """
    kept = _kept(requests, recorded)
    if kept is not None:
        return kept
    try:
        content = _packed(requests)
    except (RecordError, OverflowError):  # the reader of lines says what is wrong
        return None
    if keeps_copy:
        with suppress(OSError):  # a directory that is not ours to write
            write_bytes_atomic(arrays_path(requests), content)
    return _unpacked(tensors_of(content)[0])


def _kept(requests: Path, recorded: FileDigest | None) -> tuple[RequestRecord, ...] | None:
    try:
        tensors, metadata = tensors_of(arrays_path(requests).read_bytes())
        if metadata.get("version") != _VERSION or metadata.get("requests_sha256") != _sha256(requests, recorded):
            return None
        return _unpacked(tensors)
    except (OSError, ValueError, KeyError, msgspec.MsgspecError):  # a copy that cannot be read: the file can
        return None


def _sha256(path: Path, recorded: FileDigest | None) -> str:
    stat = path.stat()
    if recorded is not None and (stat.st_size, stat.st_mtime_ns) == (recorded.size_bytes, recorded.mtime_ns):
        return recorded.sha256
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _packed(requests: Path) -> bytes:
    """The copy of a file. RecordError at a damaged line, OverflowError for a number beyond 64 bits."""
    digest, records = hashlib.sha256(), bytearray()
    values = {name: array("q") for name in CHUNK_FIELDS}
    lengths = {name: array("i") for name in CHUNK_FIELDS}
    with requests.open("rb") as file:
        for record in decode_lines(_digested(file, digest), requests, RequestRecord):
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
    return tensor_bytes(tensors, {"version": _VERSION, "requests_sha256": digest.hexdigest()})


def _digested(lines: Iterable[bytes], digest: "_Hash") -> Iterator[bytes]:
    for line in lines:
        digest.update(line)
        yield line


def _unpacked(tensors: Mapping[str, Numbers]) -> tuple[RequestRecord, ...]:
    """The records with their numbers. KeyError and ValueError where arrays are missing, or do not fit together."""
    records = msgspec.json.Decoder(RequestRecord).decode_lines(tensors[_RECORDS].tobytes())
    choices = [choice for record in records for choice in record.choices]
    for name, default in CHUNK_FIELDS.items():
        lengths = tensors[name + _LENGTHS]
        if default is None and not len(lengths[lengths >= 0]):
            continue  # no choice has any: the records are right as they are
        for choice, numbers in zip(choices, _pieces(tensors[name], lengths), strict=True):
            msgspec.structs.force_setattr(choice, name, numbers)
    return tuple(records)


def _pieces(values: Numbers, lengths: Numbers) -> "list[array[Any] | tuple[()] | None]":
    """The numbers of each choice; choices with the same small ones, as one token in each chunk, share them."""
    ends = np.cumsum(np.maximum(lengths, 0), dtype=np.int64).tolist()
    num_named = ends[-1] if ends else 0
    if num_named != len(values):
        raise ValueError(f"{num_named} values are named and {len(values)} are there")
    code = _TYPE_CODES[values.dtype.name]
    whole = array(code, values.tobytes())
    pieces = [whole[start:end] for start, end in pairwise([0, *ends])]  # each of just the size that it needs
    if code == "B":
        known: dict[bytes, array[Any]] = {}
        pieces = [known.setdefault(piece.tobytes(), piece) for piece in pieces]
    return [
        numbers or (None if length < 0 else ()) for numbers, length in zip(pieces, lengths.tolist(), strict=True)
    ]
