"""The keys of a ``config.json``: each value is checked, and errors name file and key."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchctl.errors import UsageError


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """Keys and values of one file."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "ConfigKeys":
        """The keys of a file; those of its language model, if it has one beside others, come first."""
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: cannot be read as JSON ({error}); name a model's own config.json") from error
        if not isinstance(config, dict):
            raise UsageError(
                f"{path}: holds {type(config).__name__}, not an object; name a model's own config.json"
            )
        for part in ("text_config", "language_config"):
            if isinstance(text := config.get(part), dict):
                config |= text
        return cls(path, config)

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type") or "")

    def positive(self, *keys: str, absent: int | None = None) -> int:
        """The value of the first of these keys that is there: a positive whole number."""
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        value = self.values.get(key)
        if value is None and absent is not None:
            return absent
        if value is None:
            raise UsageError(f"{self.path}: {' or '.join(keys)} is missing; a model's config.json has it")
        if type(value) is not int or value < 1:
            raise UsageError(f"{self.path}: {key} is {value!r}; it must be a positive whole number")
        return value

    def count(self, *keys: str, absent: int = 0) -> int:
        """As ``positive``, but 0 is a value as well."""
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        value = self.values.get(key)
        if value is None:
            return absent
        if type(value) is not int or value < 0:
            raise UsageError(f"{self.path}: {key} is {value!r}; it must be a whole number from 0")
        return value

    def flag(self, key: str) -> bool:
        """True or false; absent is false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise UsageError(f"{self.path}: {key} is {value!r}; it must be true or false")
        return bool(value)

    def whole_numbers(self, key: str) -> list[int] | None:
        """A list of whole numbers; None if it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise UsageError(f"{self.path}: {key} is {value!r}; it must be a list of whole numbers")
        return value
