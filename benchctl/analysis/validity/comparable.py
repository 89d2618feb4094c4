"""Settings that a profile declares by setting them: those in which two of its arms differ.

Comparability of two sets of runs: only the declared factor may differ.
"""

import glob
import json
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec

from benchctl.analysis.validity.comparability.launch import (
    BUILD,
    WORDS,
    alike_sizes,
    consequences_of,
    is_flag,
    launch_settings,
    names_of_flag,
    split_flags,
)
from benchctl.analysis.validity.comparability.sites import has_one_host, have_same_cores, num_cores
from benchctl.errors import NotComparableError
from benchctl.profile.model import VariantSettings
from benchctl.profile.planning import allowed_difference
from benchctl.records.loaded import LoadedResults, LoadedRun
from benchctl.records.record import ESTIMATE, PreparedRequest, RunRecord

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


Cells: TypeAlias = Mapping[str, tuple[Sequence[LoadedRun], Sequence[LoadedRun]]]
"""The runs of both sides by cell."""
NOTHING: Final[Mapping[str, Collection[str]]] = MappingProxyType({})
"""No cell declares anything."""
NEVER_ALLOWED: Final = frozenset({"request_set_sha256", "stop", "schema_version"})
_MOST_NAMED: Final = 10
"""Number of differences that the message of a refusal names; the error has all of them."""
ABSENT: Final = "absent"
_NOT_SET: Final = frozenset({ABSENT, "null"})
"""A setting that one server does not report and the other reports as not set is the same on both."""
_CORES: Final = "server.client_cores"
_FIELDS: Final[Mapping[str, Callable[[RunRecord], str | None]]] = {
    "engine_version": lambda record: record.engine_version,
    "host": lambda record: record.host if record.node is None else None,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that differs between the sides; ``cells`` are those in which it differs, empty for all."""

    key: str
    a: str
    b: str
    cells: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Other names of the same setting; allowing one of them allows the difference."""
    is_declared: bool = False
    """The profile declares it by what its variants and cells set."""

    def __str__(self) -> str:
        where = f" ({'; '.join(self.cells)})" if self.cells else ""
        return f"{self.key}: {self.a} against {self.b}{where}"


def experiment_differences(a: LoadedResults, b: LoadedResults) -> tuple[Difference, ...]:
    """Differences between two experiments: request set, seed, stop mode, kind of engine, schema.

    Request sets are the same where they ask the same: tokenizers may have counted the prompts differently.
    """
    return tuple(
        Difference(key, _as_json(getattr(a.manifest, key)), _as_json(getattr(b.manifest, key)))
        for key in ("schema_version", "request_set_sha256", "seed", "stop", "engine")
        if getattr(a.manifest, key) != getattr(b.manifest, key)
        and not (key == "request_set_sha256" and a.requests and _uncounted(a) == _uncounted(b))
    )


def _uncounted(results: LoadedResults) -> tuple[PreparedRequest, ...]:
    """The requests as they are sent, without the count of their prompts, which differs between tokenizers."""
    return tuple(
        msgspec.structs.replace(request, prompt_tokens=0, prompt_tokens_from=ESTIMATE)
        for request in results.requests
    )


def configuration_differences(
    cells: Cells, declared: Mapping[str, Collection[str]] = NOTHING, *, hostname: str | None = ""
) -> tuple[Difference, ...]:
    """Settings in which the servers of the two sides differ, over all cells: in their reported configuration, their
    command line and their environment.

    A setting that changes between the blocks of one side differs too; both values are shown. ``declared`` has the
    patterns of what the variants of each cell set. ``hostname`` is the host of runs that record no node, None for
    several: where all runs had one host, paths are compared whole, and where they had the same cores, these.
    """
    records = [run.record for sides in cells.values() for side in sides for run in side]
    is_one = has_one_host(records, hostname)
    ground = {
        "has_one_host": is_one,
        "have_same_cores": is_one and have_same_cores(records),
        "have_nodes": all(record.node is not None for record in records),
    }
    cells_of: dict[tuple[str, str, str, bool], list[str]] = {}
    names: dict[str, tuple[str, ...]] = {"server.version": ("engine_version",)}
    for cell, sides in cells.items():
        a, b = ([_settings_of(run.record, names, **ground) for run in runs] for runs in sides)
        for key in sorted({key for settings in (*a, *b) for key in settings}):
            left, right = alike_sizes(key, (_values(a, key), _values(b, key)), (*a, *b))
            # of a flag that sets a reported setting, only the reported value counts
            is_reported = is_flag(key) and any(name in settings for name in names[key] for settings in (*a, *b))
            if len({*left, *right}) > 1 and not {*left, *right} <= _NOT_SET and not is_reported:
                is_set = _is_set(key, names.get(key, ()), (left, right), declared.get(cell, ()))
                cells_of.setdefault((key, " or ".join(left), " or ".join(right), is_set), []).append(cell)
    return tuple(
        Difference(
            key, left, right, () if len(differing) == len(cells) else tuple(differing), names.get(key, ()), is_set
        )
        for (key, left, right, is_set), differing in sorted(cells_of.items())
    )


def _is_set(
    key: str, names: Sequence[str], sides: tuple[tuple[str, ...], tuple[str, ...]], declared: Collection[str]
) -> bool:
    """True where the variants set a difference. Another build of the engine may also have settings of its own."""
    is_new = key.startswith("server.") and (ABSENT,) in sides and chooses_build(declared)
    return is_declared(key, names, sides, (*declared, glob.escape(key)) if is_new else declared)


def _settings_of(
    record: RunRecord,
    names: dict[str, tuple[str, ...]],
    *,
    has_one_host: bool,
    have_same_cores: bool,
    have_nodes: bool,
) -> dict[str, str]:
    """Every setting of a run as text, reported or launched; ``names`` receives the other names of each."""
    launch = launch_settings(record, has_one_host=has_one_host, has_node=have_nodes)
    names |= {key: setting.names for key, setting in launch.items()}
    reported = {key: _as_json(value) for key, value in record.effective_config.items()}
    if not have_same_cores and _CORES in reported:
        # only the number of cores for the client: which ones, and how many are left, depends on the machine
        client, _, _ = reported[_CORES].partition(", server on ")
        reported[_CORES] = _as_json(f"{num_cores(client)} of its own for the client")
    return reported | {key: _as_json(setting.value) for key, setting in launch.items()}


def _values(settings: Sequence[Mapping[str, str]], key: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(of_run.get(key, ABSENT) for of_run in settings))


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def run_differences(
    cells: Cells, declared: Mapping[str, Collection[str]] = NOTHING, *, has_one_experiment: bool
) -> tuple[Difference, ...]:
    """Engine versions and hosts that differ between the runs of two sides, or within one side if the sides are two
    experiments (which may differ, with a warning). Runs without the record differ from none. The host of a run that
    records its node does not count: its hardware does.
    """
    differences = []
    for key, value_of in _FIELDS.items():
        recorded = {cell: [_recorded(side, value_of) for side in sides] for cell, sides in cells.items()}
        differing = {
            cell: (a, b)
            for cell, (a, b) in recorded.items()
            if (len({*a, *b}) if has_one_experiment else max(len(a), len(b))) > 1
        }
        if not differing or (key == "engine_version" and _is_in_configuration(cells)):
            continue
        left, right = (
            " or ".join(dict.fromkeys(v for sides in differing.values() for v in sides[i])) or "unknown"
            for i in (0, 1)
        )
        is_set = all(is_declared(key, (), sides, declared.get(cell, ())) for cell, sides in differing.items())
        where = () if len(differing) == len(cells) else tuple(differing)
        differences.append(Difference(key, left, right, where, is_declared=is_set))
    return tuple(differences)


def _recorded(runs: Sequence[LoadedRun], value_of: Callable[[RunRecord], str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f'"{value}"' for run in runs if (value := value_of(run.record)) is not None))


def _is_in_configuration(cells: Cells) -> bool:
    """True if the servers report it, so that it is a difference of ``server.version`` already."""
    runs = (run.record for sides in cells.values() for side in sides for run in side)
    return all(run.engine_version == run.effective_config.get("server.version") for run in runs)


def require_comparable(differences: Sequence[Difference], patterns: Sequence[str]) -> tuple[Difference, ...]:
    """Return the differences. Raises NotComparableError with each one that is not allowed."""
    refused = refused_differences(differences, patterns)
    if refused:
        raise NotComparableError(refusal(refused, words_to_allow(differences, patterns)), refused)
    return tuple(differences)


def refused_differences(differences: Sequence[Difference], patterns: Sequence[str]) -> tuple[str, ...]:
    """The differences that are not declared, or can never be allowed."""
    return tuple(str(difference) for difference in differences if _is_refused(difference, patterns))


def _is_refused(difference: Difference, patterns: Sequence[str]) -> bool:
    if difference.key in NEVER_ALLOWED:
        return True
    names = (difference.key, *difference.names)
    return not difference.is_declared and not any(allowed_difference(name, patterns) for name in names)


def words_to_allow(differences: Sequence[Difference], patterns: Sequence[str]) -> str:
    """The options of ``compare`` that allow all refused differences; empty where one can never be allowed."""
    refused = [difference.key for difference in differences if _is_refused(difference, patterns)]
    if not NEVER_ALLOWED.isdisjoint(refused):
        return ""
    return " ".join(f"--allow-difference {shlex.quote(glob.escape(key))}" for key in dict.fromkeys(refused))


def refusal(differences: Sequence[str], words: str) -> str:
    """The message for undeclared differences: the first of them, the number of others, and ``words`` that allow all
    of them.
    """
    lines = [f"  {difference}" for difference in differences[:_MOST_NAMED]]
    if len(differences) > _MOST_NAMED:
        lines.append(f"  and {len(differences) - _MOST_NAMED} more, which --json names")
    return (
        "the two sides differ in more than the declared factor:\n" + "\n".join(lines) + "\n"
        "What a variant or a cell of one profile sets is declared by that. Measure both sides alike in all else; "
        "or, if this is the change that you study, list it in the profile's allowed_differences"
        + (f", or add:\n  {words}" if words else "")
        + "\nNever allowed: "
        + ", ".join(sorted(NEVER_ALLOWED))
    )
