"""Rules of a profile beyond its types: baseline, sweep, and the settings of every run.

They read the mapping before it is a model, so that one report holds their errors and those of the types.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Final

from benchctl.profile.choices import NO_REQUESTS
from benchctl.profile.engine_options import ENGINES, engine_spec, options_class, own_variable_errors
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Profile
from benchctl.profile.request_checks import header_errors
from benchctl.profile.settings import (
    Values,
    factor_problem,
    factors_of,
    is_same,
    resolve,
    setting_of,
    settings_tree,
    swept_cells,
)
from benchctl.profile.yaml import LocatedDict, LocatedError, value_text
from benchctl.records.schema import Cell

MAX_CELLS: Final = 1000
MAX_ARMS: Final = 1000
"""Of one block; the search for a balanced order of more takes long."""
MAX_RUNS: Final = 100_000
LEAST_BLOCKS: Final = 6
"""Fewer blocks give no verdict, whatever the values."""


def profile_errors(
    profile: LocatedDict, *, is_to_send: bool = False, is_stored: bool = False
) -> Iterator[LocatedError]:
    """Every error of a profile that its types do not show; its engine must be resolved before.

    With ``is_to_send`` the variables that its headers name must be set. With ``is_stored``, what older versions let
    pass is none.
    """
    yield from _baseline_errors(profile)
    yield from _lengths_errors(profile)
    yield from _stopping_errors(profile)
    kind = profile.mapping("engine").get("kind")
    if not isinstance(kind, str) or kind not in ENGINES:
        return
    sweep_errors = tuple(_sweep_errors(profile, kind))
    yield from sweep_errors
    yield from _requests_errors(profile, kind)
    cell_errors = tuple(_cell_errors(profile))
    yield from cell_errors
    sweep = None if sweep_errors or cell_errors else _sweep(profile)
    size_errors = () if sweep is None else tuple(_size_errors(profile, sweep))
    yield from size_errors
    if size_errors:
        return
    for variant, cell in _checked_runs(profile, sweep):
        yield from resolve(profile, kind, variant, cell)[1]
        tree = settings_tree(profile, variant, cell)
        if not is_stored:
            yield from own_variable_errors(tree, kind)
            yield from _replaced_errors(profile, variant, cell)
        yield from header_errors(tree, is_to_send=is_to_send, is_stored=is_stored)


def _replaced_errors(profile: LocatedDict, variant: str, cell: Cell) -> Iterator[LocatedError]:
    """Values of the command line for a variant that no run has, because the sweep replaces them.

    In a file such a value may serve another that extends it.
    """
    for factor in cell:
        *sections, key = setting_of(factor)
        own = profile.mapping("variants", variant, *sections)
        if key in own and own.location_of(key).source == "--set":
            problem = (
                f"is {value_text(own[key])}, and sweep.{factor} replaces it in every run; leave out one of the two"
            )
            yield own.error(problem, key)


def unfit_engine(profile: LocatedDict) -> LocatedError | None:
    """The error of variants whose options their engine lacks and another one has; None where there is none.

    It stands for all errors of the profile: which others there are depends on the engine.
    """
    kind, variants = profile.mapping("engine").get("kind"), profile.mapping("variants")
    if not isinstance(kind, str) or kind not in ENGINES:
        return None
    sections = [variants.mapping(name, "server") for name in reversed(variants)]
    owners = {key: own for own in sections for key in own}  # of each key the first variant that sets it
    lacking = sorted(owners.keys() - options_class(kind).model_fields.keys())
    fitting = [each for each in ENGINES if lacking and owners.keys() <= options_class(each).model_fields.keys()]
    if not fitting:
        return None
    problem = (
        f"this experiment needs an engine with {', '.join(lacking)}, which {kind!r} lacks: {', '.join(fitting)}; "
        "name one with --engine"
    )
    return owners[lacking[0]].error(problem, lacking[0])


def baseline_name(profile: LocatedDict) -> str:
    """The name of the baseline, which need not exist; the default where it is not a name."""
    name, default = profile.get("baseline"), str(Profile.model_fields["baseline"].default)
    return name if isinstance(name, str) else default


def swept_factors(variant: Any) -> bool | list[str]:
    """The value of ``swept`` in a variant; of a list the names, the default for any other value."""
    swept = variant.get("swept", True) if isinstance(variant, LocatedDict) else True
    if isinstance(swept, list):
        return [factor for factor in swept if isinstance(factor, str)]
    return swept if isinstance(swept, bool) else True


def _lengths_errors(profile: LocatedDict) -> Iterator[LocatedError]:
    """Natural lengths are those of single answers, and serve to force lengths or to judge forced ones."""
    workload, stop = profile.mapping("workload"), profile.get("stop", Profile.model_fields["stop"].default)
    has_lengths = workload.get("lengths_from") is not None
    if not has_lengths and stop != "replay-natural":
        return
    if has_lengths and stop == "natural":
        problem = "is not used with stop: natural; set stop to replay-natural or forced, or leave it out"
        yield workload.error(problem, "lengths_from")
    num_samples = workload.get("samples_per_prompt", 1)
    if num_samples != 1 and workload.get("samples_as", "one-request") == "one-request":
        problem = (
            f"is {value_text(num_samples)} in one request, whose natural lengths cannot be told apart; "
            "set samples_as: requests"
        )
        yield workload.error(problem, "samples_per_prompt")


def _stopping_errors(profile: LocatedDict) -> Iterator[LocatedError]:
    """A rule that can never be fulfilled: too few blocks for an interval, or nothing to compare."""
    if profile.get("stopping") is None:
        return
    most = profile.get("blocks", Profile.model_fields["blocks"].default)
    if isinstance(most, int) and most < LEAST_BLOCKS:
        problem = (
            f"is {most}, and with stopping the first look is after {LEAST_BLOCKS} blocks; raise blocks, or leave "
            "out stopping"
        )
        yield profile.error(problem, "blocks" if "blocks" in profile else "stopping")
    if len(profile.mapping("variants")) == 1:
        problem = "has nothing to look at with one variant; add another, or leave out stopping"
        yield profile.error(problem, "stopping")


def _requests_errors(profile: LocatedDict, kind: str) -> Iterator[LocatedError]:
    """Requests for an engine that serves none, and none for one that does."""
    workload = profile.mapping("workload")
    dataset, serves = workload.get("dataset"), engine_spec(kind).serves_requests
    if serves and dataset == NO_REQUESTS:
        problem = f"is none, and engine {kind!r} serves requests; choose a dataset, such as synthetic"
        yield workload.error(problem, "dataset")
    if not serves and dataset != NO_REQUESTS:
        problem = f"is {value_text(dataset)}, and engine {kind!r} serves no requests; set dataset: none"
        yield workload.error(problem, "dataset") if "dataset" in workload else profile.error(problem, "workload")


def _baseline_errors(profile: LocatedDict) -> Iterator[LocatedError]:
    name, variants = baseline_name(profile), profile.mapping("variants")
    if not variants or name in variants:
        return
    hint = did_you_mean(name, variants) or "add it, or name one of them in baseline"
    problem = f"the baseline {name!r} is not a variant; variants are {', '.join(variants)}; {hint}"
    yield profile.error(problem, "baseline" if "baseline" in profile else "variants")


def _swept_variants(profile: LocatedDict) -> dict[str, Any]:
    unswept = None if profile.get("sweep_baseline") is True else baseline_name(profile)
    variants = profile.mapping("variants")
    return {name: variant for name, variant in variants.items() if name != unswept and swept_factors(variant)}


def _sweep(profile: LocatedDict) -> dict[str, Values] | None:
    """Factors and values; None when they are not of the right types."""
    factors = profile.get("sweep", {})
    is_sound = isinstance(factors, dict) and all(
        isinstance(values, list) and not any(isinstance(value, dict | list) for value in values)
        for values in factors.values()
    )
    return factors if is_sound else None


def number_of_cells(profile: LocatedDict, factors: Mapping[str, Values]) -> int:
    """The number of cells of these factors: the listed ones, or all combinations, which are not formed for it."""
    return (len(_listed_cells(profile)) if factors else 0) or prod(len(values) for values in factors.values())


def _size_errors(profile: LocatedDict, sweep: dict[str, Values]) -> Iterator[LocatedError]:
    """More arms than an order can be made of, or more runs than a result directory can hold."""
    swept, variants = _swept_variants(profile), profile.mapping("variants")
    num_arms = sum(
        number_of_cells(profile, factors_of(swept_factors(variant), sweep)) if name in swept else 1
        for name, variant in variants.items()
    )
    blocks = profile.get("blocks", Profile.model_fields["blocks"].default)
    num_runs = num_arms * blocks if isinstance(blocks, int) else 0
    if num_arms > MAX_ARMS:
        problem = f"makes {num_arms:,} arms of the variants, more than {MAX_ARMS:,}; sweep fewer values"
        yield profile.error(problem, "sweep" if sweep else "variants")
    elif num_runs > MAX_RUNS:
        problem = f"is {blocks:,}, which makes {num_runs:,} runs, more than {MAX_RUNS:,}; lower it"
        yield profile.error(problem, "blocks" if "blocks" in profile else None)


def _listed_cells(profile: LocatedDict) -> list[Any]:
    """The value of ``cells``; none where it is not a list."""
    cells = profile.get("cells")
    return cells if isinstance(cells, list) else []


def _sweep_errors(profile: LocatedDict, kind: str) -> Iterator[LocatedError]:
    sweep = profile.mapping("sweep")
    if not sweep:
        return
    if not _swept_variants(profile):
        problem = (
            "applies to no variant; add a variant beside the baseline without 'swept: false', set sweep_baseline, "
            "or remove sweep"
        )
        yield profile.error(problem, "sweep")
    yield from _listed_factor_errors(profile, sweep)
    writers: dict[tuple[str, ...], str] = {}
    for factor, values in sweep.items():
        first = writers.setdefault(setting_of(factor), factor)
        twice = f"sets what {first} sets already; sweep one of the two" if first != factor else None
        refusal = twice or factor_problem(factor, kind) or _repeated_value(values)
        if refusal:
            yield sweep.error(refusal, factor)
        yield from _unguided_errors(profile, factor)
    num_cells = number_of_cells(profile, _sweep(profile) or {})
    if num_cells > MAX_CELLS:
        problem = f"has {num_cells:,} cells, more than {MAX_CELLS:,}; sweep fewer values, or split the profile"
        yield profile.error(problem, "sweep")


def _cell_errors(profile: LocatedDict) -> Iterator[LocatedError]:
    """Listed cells that are not combinations of the sweep's values."""
    sweep = _sweep(profile)
    if sweep is None:
        return
    for cell in _listed_cells(profile):
        if not isinstance(cell, dict) or cell.keys() != sweep.keys():
            problem = f"lists {value_text(cell)}; a cell has a value of every factor of sweep: {', '.join(sweep)}"
            yield profile.error(problem, "cells")
            continue
        for factor, value in cell.items():
            if not any(is_same(value, listed) for listed in sweep[factor]):
                problem = f"lists {factor}: {value_text(value)}, which sweep.{factor} does not have; add it there"
                yield profile.error(problem, "cells")


def _listed_factor_errors(profile: LocatedDict, sweep: LocatedDict) -> Iterator[LocatedError]:
    """A variant that lists its factors and names one that is not swept."""
    for variant in profile.mapping("variants").values():
        listed = swept_factors(variant)
        for factor in listed if isinstance(listed, list) else ():
            if factor not in sweep:
                problem = f"names {value_text(factor)}, which sweep does not have; it has {', '.join(sweep)}"
                yield variant.error(problem, "swept")


def _repeated_value(values: Any) -> str | None:
    if not isinstance(values, list):
        return None
    repeated = [value for i, value in enumerate(values) if any(is_same(value, other) for other in values[:i])]
    return f"lists {value_text(repeated[0])} twice; list each value once" if repeated else None


def _unguided_errors(profile: LocatedDict, factor: str) -> Iterator[LocatedError]:
    """A swept guidance setting would silently guide a variant that was meant as a control."""
    if setting_of(factor)[0] != "guidance":
        return
    for name, variant in _swept_variants(profile).items():
        if not isinstance(variant, LocatedDict) or "guidance" in variant:
            continue
        if factor not in factors_of(swept_factors(variant), {factor: None}):
            continue
        setting = ".".join(setting_of(factor))
        words = factor if setting == factor else f"{factor} ({setting})"
        problem = (
            f"{words} is swept, but variant {name!r} has no guidance; "
            f"give it a guidance section, or set variants.{name}.swept: false"
        )
        yield profile.mapping("sweep").error(problem, factor)


def _checked_runs(profile: LocatedDict, sweep: dict[str, Values] | None) -> Iterator[tuple[str, Cell]]:
    """Every variant in its cells; swept variants are left out where the sweep itself is faulty."""
    swept, listed = _swept_variants(profile), _listed_cells(profile)
    for variant in profile.mapping("variants"):
        if variant in swept and sweep is None:
            continue
        cells = swept_cells(swept_factors(swept[variant]), sweep or {}, listed) if variant in swept else ({},)
        for cell in cells:
            yield variant, cell
