"""The weights in a model directory, as float64."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchctl.engines.tiny_models.hugging_face import NORM_EPSILON
from benchctl.errors import UsageError

_LENGTH_BYTES: Final = 8
_NUMPY_TYPES: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class StoredWeights:
    """The tensors of ``model.safetensors``. Raises UsageError where there is none that can be read."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "model.safetensors"
        try:
            with self._path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                self._entries: dict[str, Any] = json.loads(file.read(length))
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self._path}: cannot be read as the weights of a model ({error}); name a directory with "
                "config.json and model.safetensors"
            ) from error
        self._entries.pop("__metadata__", None)
        self._start = _LENGTH_BYTES + length
        self.norm_epsilon = float(config.get("rms_norm_eps", NORM_EPSILON))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def read(self, name: str) -> npt.NDArray[np.float64]:
        """One tensor in its dimensions. Raises UsageError for one that is missing or of another type."""
        entry = self._entries.get(name)
        if entry is None or entry["dtype"] not in _NUMPY_TYPES:
            state = "is missing" if entry is None else f"is of type {entry['dtype']}"
            raise UsageError(f"{self._path}: {name} {state}; make the model again, in bfloat16, float16 or float32")
        start, end = entry["data_offsets"]
        with self._path.open("rb") as file:
            file.seek(self._start + start)
            content = file.read(end - start)
        values = np.frombuffer(content, _NUMPY_TYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float64).reshape(entry["shape"])
