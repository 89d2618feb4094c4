"""Plain values that remember where they were written, and errors at those locations."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from benchctl.untrusted.text import visible_line

Step: TypeAlias = str | int


@dataclass(frozen=True, slots=True)
class Location:
    """The origin of a value: a file's line or an option of the command line, and the value's path there."""

    source: str
    line: int | None = None
    path: tuple[Step, ...] = ()

    def below(self, *steps: Step) -> "Location":
        """The same line, for a value further down."""
        return replace(self, path=(*self.path, *steps))

    def __str__(self) -> str:
        line = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"{line}: {dotted(self.path)}" if self.path else line


@dataclass(frozen=True, slots=True)
class LocatedError:
    """One error of a profile. ``problem`` names the value and the remedy."""

    location: Location
    problem: str

    def __str__(self) -> str:
        return f"{self.location}: {self.problem}"


class LocatedDict(dict[str, Any]):
    """A mapping of plain values that knows its own location and that of each entry."""

    __slots__ = ("location", "locations")

    def __init__(
        self, values: Mapping[str, Any], location: Location, locations: Mapping[str, Location] | None = None
    ) -> None:
        super().__init__(values)
        self.location = location
        self.locations = dict(locations or {})

    def mapping(self, *keys: str) -> "LocatedDict":
        """The mapping below ``keys``; an empty one where there is none."""
        value: Any = self
        for key in keys:
            value = value.get(key) if isinstance(value, LocatedDict) else None
        return value if isinstance(value, LocatedDict) else LocatedDict({}, self.location.below(*keys))

    def location_of(self, key: str) -> Location:
        """The location of an entry; that of the mapping where the entry is missing."""
        return self.locations.get(key, self.location)

    def error(self, problem: str, key: str | None = None) -> LocatedError:
        """An error of this mapping, or of its entry ``key``."""
        return LocatedError(self.location if key is None else self.location_of(key), problem)

    def with_value(self, key: str, value: Any, location: Location | None = None) -> "LocatedDict":
        """A copy with one entry set; a new entry without a location has that of the mapping."""
        location = location or self.locations.get(key) or self.location.below(key)
        return LocatedDict({**self, key: value}, self.location, {**self.locations, key: location})

    def without(self, *keys: str) -> "LocatedDict":
        """A copy without some of the entries."""
        return LocatedDict({k: v for k, v in self.items() if k not in keys}, self.location, self.locations)


class LocatedList(list[Any]):
    """A list of plain values that knows the location of each item."""

    __slots__ = ("locations",)

    def __init__(self, values: list[Any], locations: list[Location]) -> None:
        super().__init__(values)
        self.locations = locations


def dotted(path: tuple[Step, ...]) -> str:
    """``workload.arrival.kind``, ``sweep.top_k[2]``; long keys are cut."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{visible_line(step, 100)}" for step in path)
    return "".join(steps).removeprefix(".")


def value_text(value: object) -> str:
    """A value as messages show it, shortened."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) > 10**60:  # Python refuses to write one of more than 4,300 digits
        return "a whole number of more than 60 digits"
    text = repr(value[:120]) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def located(value: Any, location: Location) -> Any:
    """Plain values with one location for all of them."""
    if isinstance(value, Mapping):
        below = {str(key): location.below(str(key)) for key in value}
        return LocatedDict({str(k): located(item, below[str(k)]) for k, item in value.items()}, location, below)
    if isinstance(value, list | tuple):
        locations = [location.below(i) for i in range(len(value))]
        return LocatedList([located(item, at) for item, at in zip(value, locations, strict=True)], locations)
    return value


def follow(tree: LocatedDict, steps: tuple[Step, ...]) -> tuple[Location, Any, tuple[Step, ...]]:
    """Location and value at a path, and the steps that exist; steps that the tree does not have are skipped."""
    location, existing = tree.location, list[Step]()
    value: Any = tree
    for step in steps:
        if isinstance(value, LocatedDict) and str(step) in value:
            location, value = value.location_of(str(step)), value[str(step)]
        elif isinstance(value, LocatedList) and isinstance(step, int) and step < len(value):
            location, value = value.locations[step], value[step]
        else:
            continue
        existing.append(step)
    return location, value, tuple(existing)


def merge(below: Any, above: Any) -> Any:
    """Mappings merge key by key; anything else in ``above`` replaces what is below it."""
    if not isinstance(below, LocatedDict) or not isinstance(above, LocatedDict):
        return above
    merged = {**below, **{key: merge(below.get(key), value) for key, value in above.items()}}
    return LocatedDict(merged, above.location, below.locations | above.locations)


def changed_at(
    tree: LocatedDict, path: tuple[str, ...], change: Callable[[LocatedDict], LocatedDict]
) -> LocatedDict:
    """A copy in which the mapping at ``path`` is changed; the same tree where there is no mapping."""
    if not path:
        return change(tree)
    child = tree.get(path[0])
    if not isinstance(child, LocatedDict):
        return tree
    return tree.with_value(path[0], changed_at(child, path[1:], change))
