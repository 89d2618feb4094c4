"""Older words of profiles: still accepted, with a deprecation warning that names the new word.

``ALIASES`` is the one list. A stored profile of an older version is read with it silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from benchctl.profile.sources.located import LocatedDict, LocatedError, LocatedList, changed_at, dotted
from benchctl.records.schema import RENAMED_METRICS, RENAMED_STOP_MODES


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
    Alias(key="stop", new_key="stop", values=RENAMED_STOP_MODES, since="0.2.0"),
    Alias(key="primary_metrics", new_key="primary_metrics", values=RENAMED_METRICS, since="0.2.0"),
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


def with_new_words(
    document: LocatedDict, deprecations: list[LocatedError], errors: list[LocatedError]
) -> LocatedDict:
    """A document of one source with every older word replaced, also in its sections for some engines only."""

    def renew(tree: LocatedDict) -> LocatedDict:
        for alias in ALIASES:
            renew_word = partial(_with_new_word, alias, deprecations, errors)
            tree = changed_at(tree, tuple(alias.key.split(".")[:-1]), renew_word)
        return tree

    document = changed_at(renew(document), ("for_unguided_engines",), renew)
    for kind in document.mapping("per_engine"):
        document = changed_at(document, ("per_engine", kind), renew)
    return document


def _with_new_word(
    alias: Alias, deprecations: list[LocatedError], errors: list[LocatedError], section: LocatedDict
) -> LocatedDict:
    key, new_key = alias.key.split(".")[-1], alias.new_key.split(".")[-1]
    if key not in section:
        return section
    if new_key != key and new_key in section:
        errors.append(section.error(f"is the older name of {new_key}, which is set too; remove it", key))
        return section.without(key)
    value, location = section[key], section.location_of(key)
    words = value if isinstance(value, LocatedList) else [value]
    new_words = {word: alias.values[word] for word in words if isinstance(word, str) and word in alias.values}
    sections = {alias.key: alias.new_key for alias in ALIASES}
    new_path = dotted((*(sections.get(str(step), step) for step in location.path[:-1]), new_key))
    for word, new_word in new_words.items():
        text = str(new_word).lower() if isinstance(new_word, bool) else new_word
        problem = f"{word} is deprecated since {alias.since}; write {new_path}: {text}"
        deprecations.append(LocatedError(location, problem))
    if new_key != key and not new_words:
        problem = f"this key is deprecated since {alias.since}; write {new_path}"
        deprecations.append(LocatedError(location, problem))
    renewed = [new_words.get(word, word) if isinstance(word, str) else word for word in words]
    new_value = LocatedList(renewed, value.locations) if isinstance(value, LocatedList) else renewed[0]
    entries = {new_key if k == key else k: new_value if k == key else v for k, v in section.items()}
    return LocatedDict(entries, section.location, {**section.locations, new_key: location})
