"""The weights in a model directory, as float64."""

import math
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.engines.tiny_models.files import NORM_EPSILON
from benchctl.errors import UsageError
from benchctl.untrusted import DOCUMENT_BYTES
from benchctl.untrusted.reading import DECODING_ERRORS, UnreadableError, decoding_problem, read_bytes

_LENGTH_BYTES: Final = 8
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_DAMAGE: Final[tuple[type[Exception], ...]] = (OSError, UnreadableError, *DECODING_ERRORS)
_NUMPY_TYPES: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class _Config(msgspec.Struct, frozen=True):
    rms_norm_eps: Annotated[float, msgspec.Meta(ge=0, le=1)] = NORM_EPSILON


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the header of the file; its offsets (first byte, byte after the last) are those in the data."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class StoredWeights:
    """The tensors of ``model.safetensors``. Raises UsageError where there is none that can be read."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "model.safetensors"
        try:
            self._num_bytes = self._path.stat().st_size
            with self._path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                header = file.read(min(length, DOCUMENT_BYTES))
            self._entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            config = msgspec.json.decode(read_bytes(directory / "config.json"), type=_Config)
        except _DAMAGE as error:
            raise UsageError(
                f"{self._path}: cannot be read as the weights of a model ({decoding_problem(error)}); name a "
                "directory with config.json and model.safetensors"
            ) from error
        self._entries.pop("__metadata__", None)
        self._start = _LENGTH_BYTES + length
        self.norm_epsilon = config.rms_norm_eps

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def read(self, name: str) -> npt.NDArray[np.float64]:
        """One tensor in its dimensions. Raises UsageError for one that is missing or of another type."""
        entry = self._entry(name)
        start, end = entry.data_offsets
        kind = np.dtype(_NUMPY_TYPES[entry.dtype])
        num_bytes = math.prod(entry.shape) * kind.itemsize
        if not start <= end <= self._num_bytes - self._start or end - start != num_bytes:
            raise self._damaged(name, f"has offsets {start} to {end} for {num_bytes} bytes, which do not fit")
        with self._path.open("rb") as file:
            file.seek(self._start + start)
            content = file.read(end - start)
        values = np.frombuffer(content, kind)
        if entry.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float64).reshape(entry.shape)

    def _entry(self, name: str) -> "_Entry":
        if name not in self._entries:
            raise self._damaged(name, "is missing")
        try:
            entry = msgspec.json.decode(self._entries[name], type=_Entry)
        except DECODING_ERRORS as error:
            raise self._damaged(name, f"is damaged ({decoding_problem(error)})") from error
        if entry.dtype not in _NUMPY_TYPES:
            raise self._damaged(name, f"is of type {entry.dtype}")
        return entry

    def _damaged(self, name: str, problem: str) -> UsageError:
        return UsageError(f"{self._path}: {name} {problem}; make the model again, in bfloat16, float16 or float32")
