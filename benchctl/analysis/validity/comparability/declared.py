"""Settings that a profile declares by setting them: those in which two of its arms differ.

They are named as the effective configuration and the launch of a server name them: ``sampling.top_k``,
``server.max_num_seqs``, ``env.NAME``, ``argv.--flag``. What differs beside them is declared by
``allowed_differences`` alone.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from benchctl.analysis.validity.comparability.consequences import BUILD, consequences_of
from benchctl.analysis.validity.comparability.launch import WORDS, names_of_flag, split_flags
from benchctl.profile.model import VariantSettings
from benchctl.profile.planning.plan import allowed_difference

_ABSENT: Final = object()
"""Value of a setting that one side lacks: a server without guidance reports none of its settings, not even null."""
_ENV: Final = "server.env"
_EXTRA_ARGS: Final = "server.extra_args"
COLLECTIVE: Final = frozenset({_ENV, _EXTRA_ARGS})
"""Options that hold several settings. They stand for all variables and flags only where somebody writes so in
``allowed_differences``; a variant declares the ones that it sets."""


def declared_settings(a: VariantSettings, b: VariantSettings, kind: str) -> frozenset[str]:
    """Patterns of the settings that follow from what two arms of a profile set differently, on this engine.

    Laws: the same for b and a; empty for equal settings.
    """
    a_values, b_values = _settings_by_path(a), _settings_by_path(b)
    names: set[str] = set()
    for path in a_values.keys() | b_values.keys():
        left, right = a_values.get(path, _ABSENT), b_values.get(path, _ABSENT)
        if left != right:
            names |= set(_names(path, left, right))
    return frozenset(names) | consequences_of(names, kind)


def is_declared(
    key: str, names: Collection[str], sides: tuple[Sequence[str], Sequence[str]], declared: Collection[str]
) -> bool:
    """True where patterns cover a setting with these values of both sides; ``names`` are its other names.

    A setting that changes between the runs of one side is none that a variant sets.
    """
    left, right = sides
    if len(left) != 1 or len(right) != 1:
        return False
    return any(
        allowed_difference(name, declared) for name in (key, *names) if name == key or name not in COLLECTIVE
    )


def chooses_build(declared: Collection[str]) -> bool:
    """True where the arms differ in the build of the engine."""
    return not BUILD.isdisjoint(declared)


def _settings_by_path(settings: VariantSettings) -> dict[str, Any]:
    """Settings by dotted path, as the effective configuration of a run names them."""
    document = settings.model_dump(mode="json", include={"server", "guidance"})
    sections = {name: section or {} for name, section in document.items()}
    by_path = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {"model": settings.model, **by_path, **settings.stated()}


def _names(path: str, left: Any, right: Any) -> Iterator[str]:
    """The names under which a setting with these two values appears in records."""
    yield path
    if path == _EXTRA_ARGS:
        yield from _names_of_words(left or (), right or ())
    elif isinstance(left, Mapping) or isinstance(right, Mapping):
        left, right = (value if isinstance(value, Mapping) else {} for value in (left, right))
        prefix = "env" if path == _ENV else path
        yield from (f"{prefix}.{key}" for key in left.keys() | right.keys() if left.get(key) != right.get(key))


def _names_of_words(left: Sequence[str], right: Sequence[str]) -> Iterator[str]:
    """The flags with different values, under their own name and those of the option that they spell."""
    (left_flags, left_plain), (right_flags, right_plain) = split_flags(left), split_flags(right)
    for flag in left_flags.keys() | right_flags.keys():
        if left_flags.get(flag) != right_flags.get(flag):
            yield from (f"argv.{flag}", *names_of_flag(flag))
    if left_plain != right_plain:
        yield WORDS
