"""Bounds of every plain value of a profile, whatever its key: numbers of 64 bits, and texts that can be passed on.

They are checked before the keys are, so that nothing behind has to expect a number that JSON cannot hold, or a text
that no command line, header or path can.
"""

from collections.abc import Iterator
from math import isfinite
from typing import Any, Final

from benchctl.profile.sources.located import LocatedDict, LocatedError, LocatedList, Location, Step, value_text
from benchctl.untrusted.limits import PROFILE_DEPTH
from benchctl.untrusted.text import visible, visible_line

MAX_TEXT: Final = 65_536
"""Characters of one text; a word of a command line can have 128 KiB."""
MAX_PATH: Final = 4096
"""Bytes of a name or path, as Linux has them."""
MAX_PATH_PART: Final = 255
MAX_KEY: Final = 256
_MOST_INT: Final = 2**63 - 1
_LONGEST_INT: Final = 10**60
"""Of keys with a range, whose own message says more."""
_TEXTS: Final = frozenset(
    {"description", "extra_body", "response_format", "structured_outputs", "chat_template_kwargs"}
)
"""Keys below which a text may have lines, such as a grammar."""
_FREE: Final = _TEXTS | {"sweep", "cells"}
"""Keys below which a number has no range of its own."""
_WORDS: Final = frozenset({"extra_args", "env", "headers", "setup", "speculative_config"})
"""Keys below which a text is on one line, and no path."""


def plain_value_errors(tree: LocatedDict) -> Iterator[LocatedError]:
    """Every value and key of a profile that is beyond these bounds."""
    yield from _errors(tree, tree.location, (), 0)


def _errors(value: Any, location: Location, path: tuple[Step, ...], depth: int) -> Iterator[LocatedError]:
    if isinstance(value, dict | list) and depth > PROFILE_DEPTH:
        yield LocatedError(location, f"is nested more than {PROFILE_DEPTH} deep; write it flatter")
    elif isinstance(value, LocatedDict):
        for key, item in value.items():
            if len(key) > MAX_KEY or visible_line(key) != key:
                problem = f"{value_text(key)} has control characters or more than {MAX_KEY} of any; rename it"
                yield LocatedError(location, problem)
            else:
                yield from _errors(item, value.location_of(key), (*path, key), depth + 1)
    elif isinstance(value, LocatedList):
        for i, (item, at) in enumerate(zip(value, value.locations, strict=True)):
            yield from _errors(item, at, (*path, i), depth + 1)
    elif (refusal := _problem(value, path)) is not None:
        yield LocatedError(location, refusal)


def _problem(value: object, path: tuple[Step, ...]) -> str | None:
    steps = set(path)
    if path[:1] == ("sweep",):  # a factor is a path of its own
        steps.update(*(str(factor).split(".") for factor in path[1:2]))
    if isinstance(value, str):
        return _text_problem(value, steps)
    if isinstance(value, int) and abs(value) > (_MOST_INT if steps & _FREE else _LONGEST_INT):
        return f"is {value_text(value)}; a whole number has 64 bits at most"
    if isinstance(value, float) and not isfinite(value):
        return f"is {value}, and no setting is; write a finite number"
    return None


def _text_problem(text: str, steps: set[Step]) -> str | None:
    if len(text) > MAX_TEXT:
        return f"has {len(text):,} characters, more than {MAX_TEXT:,}; shorten it"
    if steps & _TEXTS:
        return _control_problem(text, visible(text, MAX_TEXT))
    if problem := _control_problem(text, visible_line(text, MAX_TEXT)):
        return problem
    if steps & _WORDS:
        return None
    if not text.strip():
        return f"is {value_text(text)}, which names nothing; write a name, or leave the key out"
    longest = max(len(part.encode()) for part in text.split("/"))
    if longest > MAX_PATH_PART or len(text.encode()) > MAX_PATH:
        return f"is {value_text(text)}, longer than a name ({MAX_PATH_PART} bytes) or a path can be; shorten it"
    return None


def _control_problem(text: str, escaped: str) -> str | None:
    if escaped == text:
        return None
    return f"is {value_text(text)}, which has control characters; remove them"
