"""Comparability of two sets of runs: settings, engine versions and hardware; only the declared factor may differ.

A profile declares settings by setting them: those in which two of its arms differ.
"""

import glob
import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec

from benchctl.analysis.validity.launch import (
    BUILD,
    ENV,
    EXTRA_ARGS,
    WORDS,
    Sides,
    alike_sizes,
    consequences_of,
    launch_settings,
    names_of,
    split_flags,
)
from benchctl.analysis.validity.machines import ABSENT, gpu_names_text, num_cores
from benchctl.errors import NotComparableError
from benchctl.profile.engine_table import OWN_PREFIX
from benchctl.profile.model import VariantSettings
from benchctl.profile.planning import allowed_difference
from benchctl.profile.settings import load_part
from benchctl.records.directory import cell_name
from benchctl.records.loaded import LoadedResults, LoadedRun
from benchctl.records.record import ESTIMATE, PreparedRequest, RunRecord
from benchctl.records.schema import NodeGpu
from benchctl.units import first_of
from benchctl.untrusted.text import visible_line

COLLECTIVE: Final = frozenset({ENV, EXTRA_ARGS})
"""Options that hold several settings. They stand for all variables and flags only where somebody writes so in
``allowed_differences``; a variant declares the ones that it sets."""


def declared_settings(a: VariantSettings, b: VariantSettings, kind: str) -> frozenset[str]:
    """Patterns of the settings that follow from what two arms of a profile set differently, on this engine.

    Laws: the same for b and a; empty for equal settings.
    """
    left, right = _settings_by_path(a), _settings_by_path(b)
    changed = _changed(left, right)
    names = {name for path in changed for name in _names_of_change(path, left.get(path), right.get(path))}
    return frozenset(names) | consequences_of(names, kind)


def is_declared(key: str, sides: Sides, declared: Collection[str]) -> bool:
    """True where patterns cover a setting with these values of both sides, by any of its names.

    A setting that changes between the runs of one side is none that a variant sets.
    """
    if len(sides[0]) != 1 or len(sides[1]) != 1:
        return False
    return any(allowed_difference(name, declared) for name in {key, *names_of(key)} - (COLLECTIVE - {key}))


def _settings_by_path(settings: VariantSettings) -> dict[str, Any]:
    """Settings by dotted path, as the effective configuration of a run names them."""
    document = settings.model_dump(mode="json", include={"server", "guidance"})
    sections = {name: section or {} for name, section in document.items()}
    by_path = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {"model": settings.model, **by_path, **settings.stated()}


def _changed(left: Mapping[str, Any], right: Mapping[str, Any]) -> set[str]:
    """The keys with different values, also those that one side lacks: a server without guidance reports none of its
    settings, not even null.
    """
    absent = object()
    return {key for key in {**left, **right} if left.get(key, absent) != right.get(key, absent)}


def _names_of_change(path: str, left: Any, right: Any) -> Iterator[str]:
    """The names under which a setting with these two values appears in records."""
    yield path
    if path == EXTRA_ARGS:
        (left_flags, left_words), (right_flags, right_words) = split_flags(left or ()), split_flags(right or ())
        for flag in _changed(left_flags, right_flags):
            yield from (f"argv.{flag}", *names_of(f"argv.{flag}"))
        if left_words != right_words:
            yield WORDS
    elif isinstance(left, Mapping) or isinstance(right, Mapping):
        left, right = (value if isinstance(value, Mapping) else {} for value in (left, right))
        prefix = "env" if path == ENV else path
        yield from (f"{prefix}.{key}" for key in _changed(left, right))


Cells: TypeAlias = Mapping[str, tuple[Sequence[LoadedRun], Sequence[LoadedRun]]]
"""The runs of both sides by cell."""
NOTHING: Final[Mapping[str, Collection[str]]] = MappingProxyType({})
"""No cell declares anything."""
NEVER_ALLOWED: Final = frozenset({"request_set_sha256", "stop", "schema_version"})
_MOST_NAMED: Final = 10
"""Number of differences that the message of a refusal names; the error has all of them."""
_CORES: Final = "server.client_cores"
_OF_RUNS: Final = frozenset({"engine_version", "host"})
"""Recorded of each run, by benchctl and not by its server."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that differs between the sides; ``cells`` are those in which it differs, empty for all."""

    key: str
    a: str
    b: str
    cells: tuple[str, ...] = ()
    is_declared: bool = False
    """The profile declares it by what its variants and cells set."""

    def __str__(self) -> str:
        where = f" ({'; '.join(self.cells)})" if self.cells else ""
        return f"{self.key}: {self.a} against {self.b}{where}"


def experiment_differences(a: LoadedResults, b: LoadedResults) -> tuple[Difference, ...]:
    """Differences between two experiments: request sets, seed, stop mode, kind of engine, schema, loads per server.

    Request sets are the same where they ask the same under every load that both experiments have: tokenizers may
    have counted the prompts differently.
    """
    a_loads, b_loads = (max((len(run.record.loads) or 1 for run in side.runs), default=1) for side in (a, b))
    loads = [Difference("loads_per_server", str(a_loads), str(b_loads))] if a_loads != b_loads else []
    of_manifests = (
        Difference(key, _as_json(getattr(a.manifest, key)), _as_json(getattr(b.manifest, key)))
        for key in ("schema_version", "request_set_sha256", "seed", "stop", "engine")
        if getattr(a.manifest, key) != getattr(b.manifest, key)
        and not (key == "request_set_sha256" and _have_same_requests(a, b))
    )
    of_a, of_b = ("ladder" if any(run.ladder for run in side.plan.runs) else "fresh" for side in (a, b))
    return (*of_manifests, *loads, *([Difference("per_server", of_a, of_b)] if of_a != of_b else []))


def planned_differences(a: VariantSettings, b: VariantSettings) -> Iterator[Difference]:
    """The settings in which two arms of a profile will differ."""
    left, right = _settings_by_path(a), _settings_by_path(b)
    for key in sorted(_changed(left, right)):
        before, after = (_as_json(side[key]) if key in side else ABSENT for side in (left, right))
        yield Difference(key, before, after, is_declared=True)


def _have_same_requests(a: LoadedResults, b: LoadedResults) -> bool:
    """True where every load point that both plans have sends the same requests."""
    of_a, of_b = ([load_part(run.cell) for run in side.plan.runs] for side in (a, b))
    points = {cell_name(point): point for point in of_a if point in of_b}.values()
    sent = [(_uncounted(a.sets.of(point)), _uncounted(b.sets.of(point))) for point in points]
    return bool(sent) and all(left == right != () for left, right in sent)


def _uncounted(requests: Sequence[PreparedRequest]) -> tuple[PreparedRequest, ...]:
    """The requests as they are sent, without the count of their prompts, which differs between tokenizers."""
    return tuple(
        msgspec.structs.replace(request, prompt_tokens=0, prompt_tokens_from=ESTIMATE) for request in requests
    )


def setting_differences(
    cells: Cells,
    declared: Mapping[str, Collection[str]] = NOTHING,
    *,
    hostname: str | None = "",
    has_one_experiment: bool = True,
) -> tuple[Difference, ...]:
    """Settings in which the servers of the two sides differ, over all cells: in their reported configuration, their
    command line and their environment; then engine versions and hosts.

    A setting that changes between the blocks of one side differs too; both values are shown. ``declared`` has the
    patterns of what the variants of each cell set. ``hostname`` is the host of runs that record no node, None for
    several: where all runs had one host, paths are compared whole, and where they had the same cores, these. Two
    experiments may have different engine versions and hosts, with a warning, if each had one.
    """
    records = [run.record for side in chain(*cells.values()) for run in side]
    hosts = {hostname if record.node is None else record.node.hostname for record in records}
    is_one = len(hosts) <= 1 and None not in hosts
    ground = {
        "has_one_host": is_one,
        "have_same_cores": is_one and len({record.node and record.node.cores for record in records}) <= 1,
        "have_nodes": all(record.node is not None for record in records),
        "report_version": all(r.engine_version == r.effective_config.get("server.version") for r in records),
    }
    once = {id(record): record for record in records}  # a baseline is in many cells
    settings_of = {key: _settings_of(record, **ground) for key, record in once.items()}
    cells_of: dict[tuple[bool, str, str, str, bool], list[str]] = {}
    for cell, sides in cells.items():
        a, b = ([settings_of[id(run.record)] for run in runs] for runs in sides)
        keys = {key for settings in (*a, *b) for key in settings}
        for key in sorted(keys):
            left, right = alike_sizes(key, (_values(a, key), _values(b, key)), (*a, *b))
            # of a flag that sets a reported setting, only the reported value counts
            is_reported = key.startswith("argv.-") and not keys.isdisjoint(names_of(key))
            may_differ = key in _OF_RUNS and not has_one_experiment and max(len(left), len(right)) <= 1
            # A setting that one server does not report and the other reports as not set is the same on both
            if (
                len({*left, *right}) > 1
                and not {*left, *right} <= {ABSENT, "null"}
                and not is_reported
                and not may_differ
            ):
                patterns = {*declared.get(cell, ())}
                if key.startswith("server.") and (ABSENT,) in (left, right) and patterns & BUILD:
                    patterns.add(glob.escape(key))  # another build of the engine may have settings of its own
                of_a, of_b = (" or ".join(values) or "unknown" for values in (left, right))
                is_set = is_declared(key, (left, right), patterns)
                # benchctl's own variables pass on an option that the server reports
                if not (is_set and key.startswith(f"env.{OWN_PREFIX}")):
                    cells_of.setdefault((key in _OF_RUNS, key, of_a, of_b, is_set), []).append(cell)
    return tuple(
        Difference(key, left, right, () if len(differing) == len(cells) else tuple(differing), is_set)
        for (_, key, left, right, is_set), differing in sorted(cells_of.items())
    )


def _settings_of(
    record: RunRecord, *, has_one_host: bool, have_same_cores: bool, have_nodes: bool, report_version: bool
) -> dict[str, str]:
    """Every setting of a run as text, reported or launched, and what served it.

    A version that all servers report counts once; the host of a run that records its node does not: its hardware
    does.
    """
    launch = launch_settings(record, has_one_host=has_one_host, has_node=have_nodes)
    reported = {key: _as_json(value) for key, value in record.effective_config.items()}
    if not have_same_cores and _CORES in reported:
        # only the number of cores for the client: which ones, and how many are left, depends on the machine
        client, _, _ = reported[_CORES].partition(", server on ")
        reported[_CORES] = _as_json(f"{num_cores(client)} of its own for the client")
    served_by = {
        "engine_version": None if report_version else record.engine_version,
        "host": record.host if record.node is None else None,
    }
    recorded = launch | {key: value for key, value in served_by.items() if value}
    return reported | {key: _as_json(value) for key, value in recorded.items()}


def _values(settings: Sequence[Mapping[str, str]], key: str) -> tuple[str, ...]:
    """The values of a setting; runs without a record of engine version or host differ from none."""
    values = dict.fromkeys(of_run.get(key, ABSENT) for of_run in settings)
    return tuple(value for value in values if value != ABSENT or key not in _OF_RUNS)


_as_json: Final = json.JSONEncoder(sort_keys=True).encode
"""As ``json.dumps``, which makes an encoder for each call."""


HARDWARE: Final = "hardware"
"""Key of the difference, as ``allowed_differences`` and ``--allow-difference`` take it."""
_MOST_NODES: Final = 4


def hardware_parts(record: RunRecord) -> Mapping[str, str]:
    """The parts of a run's hardware by name; empty where its numbers do not depend on any, or none is recorded."""
    node = record.node
    if node is None or record.is_virtual:
        return {}
    parts = {"GPUs": gpu_names_text(node.gpus) or "no visible GPU", "processor": node.cpu_model or "unknown"}
    if node.gpus:
        limits_w = (gpu.power_limit_w for gpu in node.gpus)
        of_devices = {
            "driver": {gpu.driver or "unknown" for gpu in node.gpus},
            "clocks": set(map(_clocks, node.gpus)),
            "power limit": {"unknown" if limit_w is None else f"{limit_w:.0f} W" for limit_w in limits_w},
        }
        parts |= {name: " and ".join(sorted(values)) for name, values in of_devices.items()}
    else:  # without devices the speed is that of the cores
        parts["cores"] = "unknown" if node.cores is None else str(num_cores(node.cores))
    return parts | node.build


def _clocks(gpu: NodeGpu) -> str:
    if gpu.max_sm_clock_mhz is None and gpu.max_memory_clock_mhz is None:
        return "unknown"
    return f"up to {gpu.max_sm_clock_mhz or '?'} and {gpu.max_memory_clock_mhz or '?'} MHz"


def hardware_differences(cells: Cells, *, has_one_experiment: bool) -> tuple[Difference, ...]:
    """The difference between blocks that were measured on unlike hardware: which blocks, on which of it; or none.

    The sides of one experiment ran on the same machines. Those of two may differ, with a warning, if each had one
    hardware.
    """
    differing: set[str] = set()
    for side in chain(*cells.values()):
        of_side = [parts for run in side if (parts := hardware_parts(run.record))]
        names = {name for parts in of_side for name in parts}
        differing |= {name for name in names if len({parts.get(name, ABSENT) for parts in of_side}) > 1}
    if not differing:
        return ()
    a, b = ({run.record.run_id: run.record for sides in cells.values() for run in sides[i]} for i in (0, 1))
    if has_one_experiment:
        first, *others = _blocks_on_each([*a.values(), *b.values()], differing)
        return (Difference(HARDWARE, first, " and ".join(others)),)
    left, right = (" or ".join(_blocks_on_each(side.values(), differing)) or "unknown" for side in (a, b))
    return (Difference(HARDWARE, left, right),)


def _blocks_on_each(of_side: Iterable[RunRecord], names: set[str]) -> list[str]:
    """For each hardware: its differing parts, with the blocks and nodes of its runs; most blocks first."""
    records: dict[str, list[RunRecord]] = {}
    for record in sorted(of_side, key=lambda record: record.index):
        if parts := hardware_parts(record):
            ordered = [*(name for name in parts if name in names), *sorted(names - parts.keys())]
            values = ((name, parts.get(name, ABSENT)) for name in ordered)
            text = ", ".join(value if name == "GPUs" else f"{name} {value}" for name, value in values)
            records.setdefault(text, []).append(record)
    ranked = []
    for text, of_hardware in records.items():
        blocks = [str(block) for block in sorted({record.block for record in of_hardware})]
        nodes = list(dict.fromkeys(record.node.name for record in of_hardware if record.node is not None))
        where = f"{first_of(blocks, 2 * _MOST_NODES)} on {first_of(nodes, _MOST_NODES)}"
        sentence = visible_line(f"{text} (block{'' if len(blocks) == 1 else 's'} {where})")
        ranked.append((-len(blocks), sentence))
    return [sentence for _, sentence in sorted(ranked, key=itemgetter(0))]


def refused_differences(differences: Sequence[Difference], patterns: Sequence[str]) -> tuple[Difference, ...]:
    """The differences that are not declared, or can never be allowed."""

    def is_allowed(difference: Difference) -> bool:
        names = (difference.key, *names_of(difference.key))
        return difference.is_declared or any(allowed_difference(name, patterns) for name in names)

    return tuple(each for each in differences if each.key in NEVER_ALLOWED or not is_allowed(each))


def require_comparable(differences: Sequence[Difference], patterns: Sequence[str]) -> tuple[Difference, ...]:
    """Return the differences. Raises NotComparableError with each one that is not allowed.

    Its message names the first of them, the number of others, and the options that allow all, or those that can
    never be allowed.
    """
    refused = refused_differences(differences, patterns)
    if not refused:
        return tuple(differences)
    lines = [f"  {difference}" for difference in refused[:_MOST_NAMED]]
    if len(refused) > _MOST_NAMED:
        lines.append(f"  and {len(refused) - _MOST_NAMED} more, which --json names")
    keys = list(dict.fromkeys(difference.key for difference in refused))
    remedy = (
        "Sides may differ in what a variant or a cell of one profile sets. Measure both alike in everything else"
    )
    never = [key for key in keys if key in NEVER_ALLOWED]
    if never:
        remedy += f": {' and '.join(never)} may never differ, because both sides have to do the same work"
    else:
        words = " ".join(f"--allow-difference {shlex.quote(glob.escape(key))}" for key in keys)
        remedy += (
            "; or, if this is the change that you study, list it in the profile's allowed_differences, or add:\n"
            f"  {words}"
        )
    text = "\n".join(["the two sides differ in more than the declared factor:", *lines, remedy])
    raise NotComparableError(text, tuple(map(str, refused)))
