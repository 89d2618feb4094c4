"""Values of options that are lists with commas."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TypeVar

from benchctl.errors import UsageError

Number = TypeVar("Number", int, float)
WordT = TypeVar("WordT", bound=str)
_MOST_CHARACTERS = 40


def numbers(
    text: str,
    option: str,
    kind: Callable[[str], Number],
    *,
    least: float | None = None,
    most: float | None = None,
) -> list[Number]:
    """Numbers in their order, of a kind and from ``least`` to ``most``. Raises UsageError for anything else."""
    begin = f"{option} {text[:_MOST_CHARACTERS]!r}: "
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{begin}expected numbers separated by commas, such as 1,2,4") from None
    if not all(isfinite(value) for value in values):
        raise UsageError(f"{begin}each must be finite")
    if (least is not None and min(values) < least) or (most is not None and max(values) > most):
        raise UsageError(f"{begin}each must be from {least} {'up' if most is None else f'to {most}'}")
    return values


def counts_of(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """Whole numbers from ``least`` up, each once."""
    return tuple(dict.fromkeys(numbers(text, option, int, least=least)))


def words_of(text: str, choices: Sequence[WordT], option: str) -> tuple[WordT, ...]:
    """Words of a list, each once. Raises UsageError for one that is not in ``choices``."""
    chosen = [next((word for word in choices if word == part.strip()), None) for part in text.split(",")]
    if None in chosen:
        raise UsageError(f"{option} is {text!r}; choose of {', '.join(choices)}, separated by commas")
    return tuple(dict.fromkeys(word for word in chosen if word is not None))
