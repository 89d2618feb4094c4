"""Rules of a profile beyond the types of its keys: baseline, lengths, stopping rule, sweep."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

from benchctl.profile.choices import NO_REQUESTS
from benchctl.profile.engine_options import ENGINES, engine_spec, options_class, own_variable_problems
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Profile
from benchctl.profile.settings import factor_problem, factors_of, is_same, setting_of
from benchctl.profile.yaml import Problem, Steps, value_text
from benchctl.records.schema import Cell

MAX_CELLS: Final = 1000
MAX_ARMS: Final = 1000
"""Of one block; the search for a balanced order of more takes long."""
MAX_RUNS: Final = 100_000
LEAST_BLOCKS: Final = 6
"""Fewer blocks give no verdict, whatever the values."""


def unfit_engine(profile: Profile) -> Problem | None:
    """The problem of variants whose options their engine lacks and another one has; None where there is none.

    It stands for all problems of the profile: which others there are depends on the engine.
    """
    kind, variants = profile.engine.kind, profile.variants
    owners = {key: name for name in reversed(variants) for key in variants[name].server}  # the first that sets it
    lacking = sorted(owners.keys() - options_class(kind).model_fields.keys())
    fitting = [each for each in ENGINES if lacking and owners.keys() <= options_class(each).model_fields.keys()]
    if not fitting:
        return None
    return ("variants", owners[lacking[0]], "server", lacking[0]), (
        f"this experiment needs an engine with {', '.join(lacking)}, which {kind!r} lacks: {', '.join(fitting)}; "
        "name one with --engine"
    )


def profile_problems(profile: Profile, *, is_stored: bool) -> Iterator[Problem]:
    """Every problem of a profile that its types and its sweep do not show.

    With ``is_stored``, what older versions let pass is none.
    """
    yield from _baseline_problems(profile)
    yield from _lengths_problems(profile)
    yield from _stopping_problems(profile)
    dataset, kind = profile.workload.dataset, profile.engine.kind
    serves = engine_spec(kind).serves_requests
    sections: dict[Steps, dict[str, Any]] = {("engine", "options"): profile.engine.options}
    sections |= {("variants", name, "server"): variant.server for name, variant in profile.variants.items()}
    for path, options in () if is_stored else sections.items():
        yield from (((*path, *below), problem) for below, problem in own_variable_problems(options, kind))
    if serves and dataset == NO_REQUESTS:
        problem = f"is none, and engine {kind!r} serves requests; choose a dataset, such as synthetic"
        yield ("workload", "dataset"), problem
    if not serves and dataset != NO_REQUESTS:
        problem = f"is {value_text(dataset)}, and engine {kind!r} serves no requests; set dataset: none"
        yield ("workload", "dataset"), problem


def _baseline_problems(profile: Profile) -> Iterator[Problem]:
    name, variants = profile.baseline, profile.variants
    if name not in variants:
        hint = did_you_mean(name, variants) or "add it, or name one of them in baseline"
        problem = f"the baseline {name!r} is not a variant; variants are {', '.join(variants)}; {hint}"
        yield ("baseline" if "baseline" in profile.model_fields_set else "variants",), problem


def _lengths_problems(profile: Profile) -> Iterator[Problem]:
    """Natural lengths are those of single answers, and serve to force lengths or to judge forced ones."""
    workload, has_lengths = profile.workload, profile.workload.lengths_from is not None
    if has_lengths and profile.stop == "natural":
        problem = "is not used with stop: natural; set stop to replay-natural or forced, or leave it out"
        yield ("workload", "lengths_from"), problem
    is_whole_request = workload.samples_per_prompt != 1 and workload.samples_as == "one-request"
    if is_whole_request and (has_lengths or profile.stop == "replay-natural"):
        problem = (
            f"is {workload.samples_per_prompt} in one request, whose natural lengths cannot be told apart; "
            "set samples_as: requests"
        )
        yield ("workload", "samples_per_prompt"), problem


def _stopping_problems(profile: Profile) -> Iterator[Problem]:
    """A rule that can never be fulfilled: too few blocks for an interval, or nothing to compare."""
    if profile.stopping is None:
        return
    if profile.blocks < LEAST_BLOCKS:
        problem = (
            f"is {profile.blocks}, and with stopping the first look is after {LEAST_BLOCKS} blocks; raise blocks, "
            "or leave out stopping"
        )
        yield ("blocks" if "blocks" in profile.model_fields_set else "stopping",), problem
    if len(profile.variants) == 1:
        yield ("stopping",), "has nothing to look at with one variant; add another, or leave out stopping"


def sweep_problems(profile: Profile) -> Iterator[Problem]:
    """Factors, values and listed cells that cannot be, and more arms or runs than an experiment can have."""
    problems = [*_factor_problems(profile), *_cell_problems(profile)]
    yield from problems or _size_problems(profile)


def swept_variants(profile: Profile) -> list[str]:
    """The variants that run in cells."""
    unswept = None if profile.sweep_baseline else profile.baseline
    return [name for name, variant in profile.variants.items() if name != unswept and variant.swept]


def _factor_problems(profile: Profile) -> Iterator[Problem]:
    sweep, kind = profile.sweep, profile.engine.kind
    if sweep and not swept_variants(profile):
        problem = (
            "applies to no variant; add a variant beside the baseline without 'swept: false', set sweep_baseline, "
            "or remove sweep"
        )
        yield ("sweep",), problem
    for name, variant in profile.variants.items() if sweep else ():
        for factor in () if isinstance(variant.swept, bool) else variant.swept:
            if factor not in sweep:
                problem = f"names {value_text(factor)}, which sweep does not have; it has {', '.join(sweep)}"
                yield ("variants", name, "swept"), problem
    reached = {
        factor for name in swept_variants(profile) for factor in factors_of(profile.variants[name].swept, sweep)
    }
    for factor in sweep.keys() - reached if reached else ():
        yield ("sweep", factor), "applies to no variant; name it in the swept of one, or remove it"
    writers: dict[tuple[str, ...], str] = {}
    for factor, values in sweep.items():
        first = writers.setdefault(setting_of(factor), factor)
        twice = f"sets what {first} sets already; sweep one of the two" if first != factor else None
        if refusal := twice or factor_problem(factor, kind) or _repeated_value(values):
            yield ("sweep", factor), refusal
        yield from _unguided_problems(profile, factor)
    if (num_cells := _number_of_cells(profile, sweep)) > MAX_CELLS:
        problem = f"has {num_cells:,} cells, more than {MAX_CELLS:,}; sweep fewer values, or split the profile"
        yield ("sweep",), problem


def _repeated_value(values: Sequence[object]) -> str | None:
    repeated = [value for i, value in enumerate(values) if any(is_same(value, other) for other in values[:i])]
    return f"lists {value_text(repeated[0])} twice; list each value once" if repeated else None


def _unguided_problems(profile: Profile, factor: str) -> Iterator[Problem]:
    """A swept guidance setting would silently guide a variant that was meant as a control."""
    setting = ".".join(setting_of(factor))
    if not setting.startswith("guidance."):
        return
    words = factor if setting == factor else f"{factor} ({setting})"
    for name in swept_variants(profile):
        variant = profile.variants[name]
        if variant.guidance is None and factors_of(variant.swept, {factor: None}):
            problem = (
                f"{words} is swept, but variant {name!r} has no guidance; "
                f"give it a guidance section, or set variants.{name}.swept: false"
            )
            yield ("sweep", factor), problem


def _cell_problems(profile: Profile) -> Iterator[Problem]:
    """Listed cells that are not combinations of the sweep's values."""
    sweep = profile.sweep
    for cell in profile.cells:
        if cell.keys() != sweep.keys():
            problem = f"lists {value_text(cell)}; a cell has a value of every factor of sweep: {', '.join(sweep)}"
            yield ("cells",), problem
            continue
        for factor, value in cell.items():
            if not any(is_same(value, listed) for listed in sweep[factor]):
                problem = f"lists {factor}: {value_text(value)}, which sweep.{factor} does not have; add it there"
                yield ("cells",), problem


def values_without_cell(profile: Profile) -> Iterator[tuple[str, Cell]]:
    """The values of the sweep that no listed cell has, each as an arm of a variant that takes the factor."""
    for factor, values in profile.sweep.items() if profile.cells else ():
        swept = [
            name for name in swept_variants(profile) if factors_of(profile.variants[name].swept, {factor: None})
        ]
        for value in values:
            if not any(is_same(cell[factor], value) for cell in profile.cells):
                yield swept[0], {factor: value}


def _number_of_cells(profile: Profile, factors: Mapping[str, Sequence[object]]) -> int:
    """The number of cells of these factors: the listed ones, or all combinations, which are not formed for it."""
    return (len(profile.cells) if factors else 0) or prod(len(values) for values in factors.values())


def _size_problems(profile: Profile) -> Iterator[Problem]:
    """More arms than an order can be made of, or more runs than a result directory can hold."""
    swept, sweep = swept_variants(profile), profile.sweep
    num_arms = sum(
        _number_of_cells(profile, factors_of(variant.swept, sweep)) if name in swept else 1
        for name, variant in profile.variants.items()
    )
    num_runs = num_arms * profile.blocks
    if num_arms > MAX_ARMS:
        problem = f"makes {num_arms:,} arms of the variants, more than {MAX_ARMS:,}; sweep fewer values"
        yield ("sweep" if sweep else "variants",), problem
    elif num_runs > MAX_RUNS:
        problem = f"is {profile.blocks:,}, which makes {num_runs:,} runs, more than {MAX_RUNS:,}; lower it"
        yield ("blocks",) if "blocks" in profile.model_fields_set else (), problem
