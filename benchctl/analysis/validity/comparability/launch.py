"""Settings of a server launch, for comparing two launches.

A command line gives ``argv.program``, ``argv.words`` and one ``argv.--flag`` for each flag, the environment one
``env.NAME`` for each variable. Values that belong to one launch alone (ports, the run's directory, its seed) are
left out or normalised. Each setting has the names of the same thing in profiles and servers, so that it is declared
and reported once.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Final

from benchctl.profile.engine_table import OWN_PREFIX, engine_specs
from benchctl.records.run import RunRecord
from benchctl.untrusted.secrets import OLD_MARK, with_old_marks

_MODEL_FLAGS: Final = ("alias", "model", "model-path", "served-model-name")
"""Flags, without ``--``, that name the model."""
_OF_ONE_LAUNCH: Final = re.compile(r"(^|[-_])port$|^(noise|default)-seed$", re.IGNORECASE)
_NUMBER: Final = re.compile(r"-?\.?\d")
_ADDRESS: Final = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):\d+")
_OURS: Final = re.compile(r"[^\s:=,]*/benchctl/engines/(?:inside/(\w+)|(\w+)/inside)")
"""Paths of benchctl itself, which are not settings of a server."""
_GIVEN: Final = "given"
"""Value of a flag without one."""
_CHOICES_OF_DEVICES: Final = frozenset({"env.CUDA_VISIBLE_DEVICES", "env.NVIDIA_VISIBLE_DEVICES"})
WORDS: Final = "argv.words"
"""The words of a command line that belong to no flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSetting:
    """One setting of a launch. ``names`` are those of the same thing in profiles and servers."""

    key: str
    value: str
    names: tuple[str, ...]


def launch_settings(
    record: RunRecord, *, has_one_host: bool = True, has_node: bool = False
) -> dict[str, LaunchSetting]:
    """The launch settings of a run's server, by key; empty if benchctl did not start it.

    Without ``has_one_host`` only the last part of paths is compared, because directories differ between machines.
    With ``has_node`` the variables that choose devices are left out: the node of the run has the devices.
    """
    settings = {
        key: LaunchSetting(key=key, value=_shared_form(value, record, has_one_host=has_one_host), names=names)
        for key, value, names in (*_of_argv(record), *_of_env(record))
    }
    return {key: setting for key, setting in settings.items() if not (has_node and key in _CHOICES_OF_DEVICES)}


def is_flag(key: str) -> bool:
    """True if a setting is a flag of a command line, not its program, a word or a variable."""
    return key.startswith("argv.-")


_Setting = tuple[str, str, tuple[str, ...]]


def _of_argv(record: RunRecord) -> Iterator[_Setting]:
    if not record.argv:
        return
    program, *words = map(with_old_marks, record.argv)
    flags, plain = split_flags(words)
    if flags.get("-m") != ["benchctl.sim"]:  # part of benchctl, in its interpreter
        yield "argv.program", program, ("server.python", "server.binary")
    if plain:
        yield WORDS, " ".join(plain), ("model", "server.extra_args")
    for flag, values in flags.items():
        if not _OF_ONE_LAUNCH.search(flag.lstrip("-")):
            # any flag may come from extra_args
            yield f"argv.{flag}", " ".join(values) or _GIVEN, (*names_of_flag(flag), "server.extra_args")


def names_of_flag(flag: str) -> tuple[str, ...]:
    """The names of the options behind a flag, in profiles and in what servers report."""
    positive = flag.lstrip("-").removeprefix("no-")
    options = _options_by_name().get(positive, (positive.replace("-", "_"),))
    return tuple("model" if option == "model" else f"server.{option}" for option in options)


def split_flags(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Flags with their values, and the words that belong to no flag. Repeated flags accumulate their values."""
    flags: dict[str, list[str]] = {}
    plain: list[str] = []
    values = plain
    for word in words:
        if word == "--":
            values = plain
        elif word.startswith("-") and not _NUMBER.match(word):
            flag, equals, value = word.partition("=")
            values = flags.setdefault(flag, [])
            values += [value] if equals else []
        else:
            values.append(word)
    return flags, plain


@cache
def _options_by_name() -> dict[str, tuple[str, ...]]:
    """Options of a profile behind each flag, without ``--`` and ``no-``, and each variable, of all engines."""
    options: dict[str, tuple[str, ...]] = dict.fromkeys(_MODEL_FLAGS, ("model",))
    for spec in engine_specs():
        flags = {flag.spelling(option): (option,) for option, flag in spec.options_class.flags().items()}
        for name, names in (*flags.items(), *spec.coded_options.items()):
            key = name.removeprefix("--").removeprefix("no-")
            options[key] = tuple(dict.fromkeys((*options.get(key, ()), *names)))
    return options


def _of_env(record: RunRecord) -> Iterator[_Setting]:
    for name, whole in record.env.items():
        value = ":".join(part for part in with_old_marks(whole).split(":") if not _OURS.match(part))
        if value not in {OLD_MARK, ""} and not _OF_ONE_LAUNCH.search(name):
            spelt = (name.removeprefix(OWN_PREFIX).lower(),) if name.startswith(OWN_PREFIX) else ()
            own = (f"server.{option}" for option in _options_by_name().get(name, spelt))
            yield f"env.{name}", value, (*own, "server.env")


def _shared_form(value: str, record: RunRecord, *, has_one_host: bool) -> str:
    """A value without the parts that are specific to this launch or machine."""
    value = re.sub(rf"[^\s:=,]*/{re.escape(record.run_id)}(?=/|$)", "<run>", value)
    value = _OURS.sub(r"<benchctl>/\1\2", _ADDRESS.sub(r"\1:<port>", value))
    return value if has_one_host else " ".join(map(_last_part, value.split(" ")))


def _last_part(word: str) -> str:
    """The last part of an absolute path, or of each of several; any other word unchanged."""
    return ":".join(PurePosixPath(part).name if part.startswith("/") else part for part in word.split(":"))
