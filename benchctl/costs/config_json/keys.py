"""The keys of a ``config.json``: each value is checked, and errors name file and key."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchctl.errors import UsageError
from benchctl.untrusted.reading import UnreadableError, read_json
from benchctl.untrusted.text import visible_value

_MOST: Final = 1 << 40
"""Above every dimension of a model."""
_MOST_LAYERS: Final = 10_000


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """Keys and values of one file."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "ConfigKeys":
        """The keys of a file; those of its language model, if it has one beside others, come first."""
        try:
            config = read_json(path)
        except UnreadableError as error:
            raise UsageError(f"{error}; name a model's own config.json") from error
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
        if type(value) is not int or not 1 <= value <= _MOST:
            raise self._wrong(key, f"a positive whole number up to {_MOST:,}")
        return value

    def layers(self) -> int:
        """The number of layers."""
        if (layers := self.positive("num_hidden_layers")) > _MOST_LAYERS:
            raise self._wrong("num_hidden_layers", f"at most {_MOST_LAYERS:,}")
        return layers

    def words(self, key: str) -> list[str]:
        """A list of words; empty if it is absent."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self._wrong(key, "a list of words")
        return value

    def _wrong(self, key: str, needed: str) -> UsageError:
        value = visible_value(self.values.get(key))
        return UsageError(f"{self.path}: {key} is {value}; it must be {needed}")

    def count(self, *keys: str, absent: int = 0) -> int:
        """As ``positive``, but 0 is a value as well."""
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        value = self.values.get(key)
        if value is None:
            return absent
        if type(value) is not int or not 0 <= value <= _MOST:
            raise self._wrong(key, f"a whole number from 0 to {_MOST:,}")
        return value

    def flag(self, key: str) -> bool:
        """True or false; absent is false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return bool(value)

    def whole_numbers(self, key: str) -> list[int] | None:
        """A list of whole numbers; None if it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise self._wrong(key, "a list of whole numbers")
        return value
