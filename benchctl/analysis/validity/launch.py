"""Names and values of the settings of a server, for comparing two: as launched, as reported, as declared.

Sizes of KV caches: equal where both servers were told a size, alike where each chose its own.
Consequences of options: settings that a server reports otherwise because an option of its profile was set.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import PurePosixPath
from typing import Final, TypeAlias

from benchctl.profile.engine_table import ENGINES, OWN_PREFIX, VLLM_KV_SIZES, options_class
from benchctl.records.loads import server_id
from benchctl.records.record import RunRecord
from benchctl.untrusted.secrets import mark

_OF_ONE_LAUNCH: Final = re.compile(r"(^|[-_])port$|^(noise|default)-seed$", re.IGNORECASE)
_NUMBER: Final = re.compile(r"-?\.?\d")
_OURS: Final = re.compile(r"[^\s:=,]*/benchctl/engines/(?:inside/(\w+)|(\w+)/inside)")
"""Paths of benchctl itself, which are not settings of a server."""
ENV: Final = "server.env"
EXTRA_ARGS: Final = "server.extra_args"
WORDS: Final = "argv.words"
"""The words of a command line that belong to no flag."""


_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "argv.program": ("server.python", "server.binary"),
    WORDS: ("model", EXTRA_ARGS),
    "server.version": ("engine_version",),
    "hardware": ("host",),
}
"""Whoever allows other hosts, as one had to before runs recorded their hardware, allows their hardware."""
_COLLECTIVE: Final = {"argv": EXTRA_ARGS, "env": ENV}


def names_of(key: str) -> tuple[str, ...]:
    """Other names of a setting: those of the same thing in profiles and in what servers report.

    Any flag may come from ``extra_args``, and any variable from ``env``.
    """
    kind, _, name = key.partition(".")
    if key in _OTHER_NAMES or kind not in _COLLECTIVE:
        return _OTHER_NAMES.get(key, ())
    spelt: tuple[str, ...] = ()
    if kind == "argv":
        name = name.lstrip("-").removeprefix("no-")
        spelt = (name.replace("-", "_"),)
    elif name.startswith(OWN_PREFIX):
        spelt = (name.removeprefix(OWN_PREFIX).lower(),)
    options = _options_by_name().get(name, spelt)
    return (*("model" if option == "model" else f"server.{option}" for option in options), _COLLECTIVE[kind])


def launch_settings(record: RunRecord, *, has_one_host: bool = True, has_node: bool = False) -> dict[str, str]:
    """The launch settings of a run's server, by key; empty if benchctl did not start it.

    Without ``has_one_host`` only the last part of paths is compared, because directories differ between machines.
    With ``has_node`` the variables that choose devices are left out: the node of the run has the devices.
    """
    settings: dict[str, str] = {}
    if record.argv:
        program, *words = record.argv
        flags, plain = split_flags(words)
        settings |= {f"argv.{flag}": " ".join(values) or "given" for flag, values in flags.items()}
        settings[WORDS] = " ".join(plain)
        if flags.get("-m") != ["benchctl.sim"]:  # part of benchctl, in its interpreter
            settings["argv.program"] = program
    for name, whole in record.env.items():
        value = ":".join(part for part in whole.split(":") if not _OURS.match(part))
        if value != mark(name) and not (has_node and name in {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}):
            settings[f"env.{name}"] = value
    shared = {}
    for key, value in settings.items():
        if value and not _OF_ONE_LAUNCH.search(key.partition(".")[2].lstrip("-")):
            text = re.sub(r"(127\.0\.0\.1|localhost|\[::1\]):\d+", r"\1:<port>", value)
            if server_id(record) in text:  # a pattern for each run takes longer than all the rest
                text = re.sub(rf"[^\s:=,]*/{re.escape(server_id(record))}(?=/|$)", "<run>", text)
            text = _OURS.sub(r"<benchctl>/\1\2", text)
            shared[key] = text if has_one_host else " ".join(map(_last_part, text.split(" ")))
    return shared


def _last_part(word: str) -> str:
    """The last part of an absolute path, or of each of several; any other word unchanged."""
    return ":".join(PurePosixPath(part).name if part.startswith("/") else part for part in word.split(":"))


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
    # Flags, without ``--``, that name the model
    options: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("alias", "model", "model-path", "served-model-name"), ("model",)
    )
    for spec in ENGINES.values():
        flags = {flag.spelling(option): (option,) for option, flag in options_class(spec.kind).flags().items()}
        for name, names in (*flags.items(), *spec.coded_options.items()):
            key = name.removeprefix("--").removeprefix("no-")
            options[key] = tuple(dict.fromkeys((*options.get(key, ()), *names)))
    return options


_STATED: Final = ("server.kv_cache_memory_bytes", "server.num_gpu_blocks_override")


Sides: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""The values of a setting on both sides."""


def alike_sizes(key: str, sides: Sides, runs: Iterable[Mapping[str, str]]) -> Sides:
    """The values of both sides, each without variation that means nothing; equal ones where the sides are alike.

    Only sizes that no option states vary so; ``runs`` are the settings of all runs. A size that one server does not
    report is unknown, and no difference.
    """
    if key not in VLLM_KV_SIZES:
        return sides
    left, right = (tuple(value for value in side if value[0].isdigit()) for side in sides)
    if not left or not right:
        return (), ()
    if any(settings.get(option, "null") != "null" for settings in runs for option in _STATED):
        return left, right
    if _are_alike((*left, *right)):
        return left[:1], left[:1]
    return (left[:1] if _are_alike(left) else left, right[:1] if _are_alike(right) else right)


def _are_alike(values: Sequence[str]) -> bool:
    numbers = list(map(float, values))
    # Largest ratio of two sizes that servers of equal options choose. vLLM keeps 150 MiB for the inaccuracy of
    # its own measurement of free memory, which is 0.6 % of a cache of 25 GiB
    return 0 < max(numbers) <= 1.02 * min(numbers)


BUILD: Final = frozenset({"server.python", "server.binary"})
"""Options that choose a build of the engine: another version may also report settings that the first one lacks."""

_ANY_BUILD: Final = (
    "engine_version", "server.version", "server.*_version", "server.python", "server.binary", "server.torch",
    "server.transformers", "argv.program",
)  # fmt: skip
_EVERY_ENGINE: Final[Mapping[str, tuple[str, ...]]] = {
    "server.python": _ANY_BUILD,
    "server.binary": _ANY_BUILD,
    "model": (
        "server.model", "server.model_path", "server.model_weights", "server.model_class", "server.model_ftype",
        "server.served_model", "server.served_model_name", "server.tokenizer",
    ),
}  # fmt: skip


def consequences_of(names: Iterable[str], kind: str) -> frozenset[str]:
    """Patterns of the settings that these options and flags of an engine change."""
    tables = (_EVERY_ENGINE, ENGINES[kind].consequences if kind in ENGINES else {})
    return frozenset(pattern for name in names for table in tables for pattern in table.get(name, ()))
