"""Named arrays in one file, as safetensors: eight bytes of length, a JSON header, and the arrays in a row.

An array is a slice of the file: nothing has to be decoded. The metadata of a file of records holds the SHA-256 of
its arrays, which is checked when they are read.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.records.schema import Size

Numbers = npt.NDArray[Any]

_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
_DATA_SHA256: Final = "data_sha256"
_TYPES: Final[dict[str, np.dtype[Any]]] = {
    "U8": np.dtype("<u1"),
    "U16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
_NAMES: Final = {dtype: name for name, dtype in _TYPES.items()}


class TensorEntry(NamedTuple):
    """One array of a file: its name, its type in the words of the format, its dimensions and its size."""

    name: str
    dtype: str
    shape: Sequence[int]
    num_bytes: int


class _Tensor(msgspec.Struct, frozen=True):
    """The entry of an array in the header; its offsets (first byte, byte after the last) are those in the data."""

    dtype: str
    shape: Sequence[Size]
    data_offsets: tuple[Size, Size]


def header_bytes(entries: Iterable[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file whose arrays follow in the order of ``entries``: length and JSON header.

    Blanks pad the header, so that the arrays begin at a multiple of eight bytes.
    """
    header: dict[str, object] = {_METADATA: metadata}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = _Tensor(entry.dtype, entry.shape, (start, end))
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded


def in_fewest_bytes(values: Numbers) -> Numbers:
    """The same whole numbers in the smallest type of the format that holds all of them."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    holds = (dtype for dtype in _TYPES.values() if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    return values.astype(next(holds), copy=False)


def tensor_bytes(tensors: Mapping[str, Numbers], metadata: Mapping[str, str]) -> bytes:
    """The content of a file with these one-dimensional arrays, of types that the format has."""
    data = b"".join(values.tobytes() for values in tensors.values())
    entries = (
        TensorEntry(name, _NAMES[values.dtype], values.shape, values.nbytes) for name, values in tensors.items()
    )
    return header_bytes(entries, {**metadata, _DATA_SHA256: hashlib.sha256(data).hexdigest()}) + data


def tensors_of(content: bytes) -> tuple[dict[str, Numbers], dict[str, str]]:
    """The arrays of a file, which share its memory, and its metadata.

    Raises ValueError or msgspec.MsgspecError if the content is not such a file, or was altered.
    """
    header_end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = msgspec.json.decode(content[_LENGTH_BYTES:header_end], type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(header.pop(_METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
    if metadata.get(_DATA_SHA256) != hashlib.sha256(memoryview(content)[header_end:]).hexdigest():
        raise ValueError("the arrays do not have the recorded SHA-256")
    tensors = {}
    for name, raw in header.items():
        tensor = msgspec.json.decode(raw, type=_Tensor)
        if tensor.dtype not in _TYPES:
            raise ValueError(f"{name} is of type {tensor.dtype}, which is not among {', '.join(_TYPES)}")
        if len(tensor.shape) != 1:
            raise ValueError(f"{name} has {len(tensor.shape)} dimensions")
        start = header_end + tensor.data_offsets[0]
        tensors[name] = np.frombuffer(content, _TYPES[tensor.dtype], tensor.shape[0], start)
    return tensors, metadata
