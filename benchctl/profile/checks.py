"""What makes a profile valid beyond its types: baseline, sweep, and the settings of every run.

The checks work on the tree, so that they tell all they can also when other parts of the profile are faulty.
"""

from collections.abc import Iterator
from math import prod
from typing import Final, get_args

from benchctl.profile.document import Fault, Node
from benchctl.profile.faults import shown
from benchctl.profile.locate import nearest
from benchctl.profile.model import EngineKind, Profile
from benchctl.profile.settings import (
    Values,
    cells_of,
    factor_name,
    factor_problem,
    factors_of,
    is_same,
    setting_of,
    settings_faults,
    settings_tree,
)

MAX_CELLS: Final = 1000
LEAST_BLOCKS: Final = 6
"""Fewer blocks give no verdict, whatever they show."""


def profile_faults(profile: Node) -> Iterator[Fault]:
    """Everything wrong with a profile's tree that its types do not show; an engine must be resolved before."""
    yield from _baseline_faults(profile)
    yield from _lengths_faults(profile)
    yield from _stopping_faults(profile)
    engine = profile.child("engine")
    kind = engine.child("kind") if engine else None
    if kind is None or kind.value not in get_args(EngineKind):
        return
    faults = tuple(_sweep_faults(profile, str(kind.value)))
    yield from faults
    yield from _settings_faults(profile, str(kind.value), None if faults else _sweep(profile))


def _lengths_faults(profile: Node) -> Iterator[Fault]:
    """Natural lengths are those of single answers, and are there to force or to judge forced ones."""
    workload = profile.child("workload")
    asked, given = profile.child("stop"), workload.child("lengths_from") if workload else None
    stop = asked.value if asked else Profile.model_fields["stop"].default
    has_lengths = given is not None and given.value is not None
    if workload is None or not (has_lengths or stop == "forced-natural"):
        return
    if given is not None and has_lengths and stop == "natural":
        problem = "is not used with stop: natural; set stop to forced-natural or forced, or leave it out"
        yield Fault(given.place, given.path, problem)
    as_one, num_samples = workload.child("samples_as"), workload.child("samples_per_prompt")
    if num_samples is not None and num_samples.value != 1 and (as_one is None or as_one.value == "one-request"):
        problem = (
            f"is {shown(num_samples.value)} in one request, whose natural lengths cannot be told apart; "
            "set samples_as: requests"
        )
        yield Fault(num_samples.place, num_samples.path, problem)


def _stopping_faults(profile: Node) -> Iterator[Fault]:
    """A rule that nothing can fulfil: too few blocks for an interval, or nothing to compare."""
    stopping, blocks = profile.child("stopping"), profile.child("blocks")
    if stopping is None or stopping.value is None:
        return
    most = blocks.value if blocks else Profile.model_fields["blocks"].default
    if isinstance(most, int) and most < LEAST_BLOCKS:
        place, path = (blocks.place, blocks.path) if blocks else (stopping.place, stopping.path)
        problem = (
            f"is {most}, and with stopping the first look is after {LEAST_BLOCKS} blocks; raise blocks, or leave "
            "out stopping"
        )
        yield Fault(place, path, problem)
    if len(_variants(profile)) == 1:
        problem = "has nothing to look at with one variant; add another, or leave out stopping"
        yield Fault(stopping.place, stopping.path, problem)


def _baseline_name(profile: Node) -> str:
    node = profile.child("baseline")
    return str(node.value if node else Profile.model_fields["baseline"].default)


def _variants(profile: Node) -> dict[str, Node]:
    node = profile.child("variants")
    return dict(node.entries()) if node else {}


def _swept_variants(profile: Node) -> dict[str, Node]:
    baseline = _baseline_name(profile)
    return {
        name: variant for name, variant in _variants(profile).items() if name != baseline and _is_swept(variant)
    }


def _swept(variant: Node) -> bool | list[str]:
    swept = variant.child("swept")
    plain = True if swept is None else swept.plain()
    return plain if isinstance(plain, bool | list) else True


def _is_swept(variant: Node) -> bool:
    return bool(_swept(variant))


def _sweep(profile: Node) -> dict[str, Values] | None:
    """Factors and values; None when they are not of the right types."""
    node = profile.child("sweep")
    factors = {} if node is None else node.plain()
    if not isinstance(factors, dict):
        return None
    for values in factors.values():
        if not isinstance(values, list) or any(isinstance(value, dict | list) for value in values):
            return None
    return factors


def _baseline_faults(profile: Node) -> Iterator[Fault]:
    name, variants = _baseline_name(profile), _variants(profile)
    if not variants or name in variants:
        return
    node = profile.child("baseline") or profile.child("variants") or profile
    near = nearest(name, variants)
    hint = f"; did you mean {near!r}?" if near else "; add it, or name one of them in baseline"
    problem = f"the baseline {name!r} is no variant; variants are {', '.join(variants)}{hint}"
    yield Fault(node.place, node.path, problem)


def _sweep_faults(profile: Node, kind: str) -> Iterator[Fault]:
    sweep = profile.child("sweep")
    if sweep is None or not sweep.entries():
        return
    if not _swept_variants(profile):
        problem = "applies to no variant; add a variant beside the baseline without 'swept: false', or remove sweep"
        yield Fault(sweep.place, sweep.path, problem)
    yield from _listed_factor_faults(profile, sweep)
    writers: dict[tuple[str, ...], str] = {}
    for factor, node in sweep.entries().items():
        first = writers.setdefault(setting_of(factor), factor)
        twice = f"sets what {first} sets already; sweep one of the two" if first != factor else None
        found = twice or factor_problem(factor, kind) or _repeated_value(node)
        if found:
            yield Fault(node.place, node.path, found)
        yield from _unguided_faults(profile, factor, node)
    num_cells = prod(len(values) for values in (_sweep(profile) or {}).values())
    if num_cells > MAX_CELLS:
        problem = f"has {num_cells} cells, more than {MAX_CELLS}; sweep fewer values, or split the profile"
        yield Fault(sweep.place, sweep.path, problem)


def _listed_factor_faults(profile: Node, sweep: Node) -> Iterator[Fault]:
    """A variant that lists its factors and names one that is not swept."""
    for variant in _variants(profile).values():
        listed, swept = _swept(variant), variant.child("swept")
        for factor in listed if isinstance(listed, list) and swept is not None else ():
            if factor not in sweep.entries():
                problem = f"names {shown(factor)}, which sweep does not have; it has {', '.join(sweep.entries())}"
                yield Fault(swept.place, swept.path, problem)  # type: ignore[union-attr]


def _repeated_value(node: Node) -> str | None:
    values = node.plain()
    if not isinstance(values, list):
        return None
    repeated = [value for i, value in enumerate(values) if any(is_same(value, other) for other in values[:i])]
    return f"lists {shown(repeated[0])} twice; list each value once" if repeated else None


def _unguided_faults(profile: Node, factor: str, node: Node) -> Iterator[Fault]:
    """A swept guidance setting would silently guide a variant that was meant as a control."""
    if setting_of(factor)[0] != "guidance":
        return
    for name, variant in _swept_variants(profile).items():
        if not isinstance(variant.plain(), dict) or variant.child("guidance") is not None:
            continue
        if factor not in factors_of(_swept(variant), {factor: None}):
            continue
        problem = (
            f"{factor_name(factor)} is swept, but variant {name!r} has no guidance; "
            f"give it a guidance section, or set variants.{name}.swept: false"
        )
        yield Fault(node.place, node.path, problem)


def _settings_faults(profile: Node, kind: str, sweep: dict[str, Values] | None) -> Iterator[Fault]:
    """Faults of every run's settings; where the sweep itself is faulty, swept variants are left out."""
    swept = _swept_variants(profile)
    for variant in _variants(profile):
        factors = {} if variant not in swept or sweep is None else factors_of(_swept(swept[variant]), sweep)
        for cell in () if sweep is None and variant in swept else cells_of(factors):
            yield from settings_faults(settings_tree(profile, variant, cell), kind)[1]
