"""Older words of profiles: still accepted, with a deprecation warning that names the new word.

``ALIASES`` is the one list. A stored profile of an older version is read with it silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from benchctl.profile.sources.located import LocatedDict, LocatedError, LocatedList, Location, changed_at, dotted


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """An older key, or older values of a key, with the new ones."""

    key: str
    """The older key as a dotted path."""
    new_key: str
    """Its new name, in the same section; equal to the older one where only values changed."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Older value to new value; for a list of words, of each word. Other values stay."""
    since: str
    """Version of benchctl in which the older word became deprecated."""


ALIASES: Final = (
    Alias(key="unguided", new_key="for_unguided_engines", since="0.2.0"),
    Alias(
        key="workload.if_missing",
        new_key="workload.on_missing_dataset",
        values={"generated": "generate"},
        since="0.2.0",
    ),
    Alias(
        key="workload.prefix_hits",
        new_key="workload.allow_prefix_cache_hits",
        values={"forbidden": False, "allowed": True},
        since="0.2.0",
    ),
)


@dataclass(frozen=True, slots=True)
class Deprecation:
    """One use of an older word."""

    location: Location
    new: str
    """The word to write in its place, with its key."""
    old_value: str | None
    since: str

    def __str__(self) -> str:
        word = f": {self.old_value}" if self.old_value else ""
        return f"{self.location}{word} is deprecated since {self.since}; write {self.new}"


def with_new_words(
    document: LocatedDict, deprecations: list[Deprecation], errors: list[LocatedError]
) -> LocatedDict:
    """A document of one source with every older word replaced, also in what it says for some engines only."""
    words = _Words(deprecations, errors)
    document = words.replaced(document)
    document = changed_at(document, ("for_unguided_engines",), words.replaced)
    for kind in document.mapping("per_engine"):
        document = changed_at(document, ("per_engine", kind), words.replaced)
    return document


@dataclass(frozen=True, slots=True)
class _Words:
    deprecations: list[Deprecation]
    errors: list[LocatedError]

    def replaced(self, tree: LocatedDict) -> LocatedDict:
        for alias in ALIASES:
            sections = tuple(alias.key.split(".")[:-1])
            tree = changed_at(tree, sections, partial(self._with_new_word, alias=alias))
        return tree

    def _with_new_word(self, section: LocatedDict, alias: Alias) -> LocatedDict:
        key, new_key = alias.key.split(".")[-1], alias.new_key.split(".")[-1]
        if key not in section:
            return section
        if new_key != key and new_key in section:
            problem = f"is the older name of {new_key}, which is set too; remove it"
            self.errors.append(section.error(problem, key))
            return section.without(key)
        location = section.location_of(key)
        new_value, new_words = _new_value(section[key], alias.values)
        new_path = dotted((*location.path[:-1], new_key))
        for word, new_word in new_words.items():
            new = f"{new_path}: {_yaml_word(new_word)}"
            self.deprecations.append(Deprecation(location, new, word, alias.since))
        if new_key != key and not new_words:
            self.deprecations.append(Deprecation(location, new_path, None, alias.since))
        entries = {new_key if k == key else k: new_value if k == key else v for k, v in section.items()}
        return LocatedDict(entries, section.location, {**section.locations, new_key: location})


def _new_value(value: Any, words: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A value with its older words replaced, and the new word for each of them."""
    if isinstance(value, LocatedList):
        older = [item for item in value if isinstance(item, str) and item in words]
        items = [words[item] if item in older else item for item in value]
        return LocatedList(items, value.locations), {item: words[item] for item in older}
    if isinstance(value, str) and value in words:
        return words[value], {value: words[value]}
    return value, {}


def _yaml_word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
