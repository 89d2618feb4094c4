"""Rules of a profile beyond the types of its keys: baseline, lengths, stopping rule, sweep."""

from collections.abc import Collection, Iterator
from math import prod
from typing import Any, Final

from benchctl.profile.arrival import RATED
from benchctl.profile.bounds import MAX_LOADS
from benchctl.profile.choices import CONVERSATIONS, NO_REQUESTS
from benchctl.profile.engine_table import ENGINES, OWN_PREFIX, options_class, own_variables
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Profile
from benchctl.profile.objective import CAPACITIES, SLO_METRICS
from benchctl.profile.settings import (
    cells_of,
    factor_problem,
    factors_of,
    is_load_factor,
    is_same,
    load_points,
    server_part,
    setting_of,
)
from benchctl.profile.yaml import Problem, Steps, value_text
from benchctl.records.directory import cell_name
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


def profile_problems(profile: Profile) -> Iterator[Problem]:
    """Every problem of a profile that its types, its sweep and its variables do not show."""
    workload, variants, kind = profile.workload, profile.variants, profile.engine.kind
    dataset, has_looks = workload.dataset, profile.stopping is not None
    has_lengths = workload.lengths_from is not None
    serves = ENGINES[kind].serves_requests
    is_whole_request = workload.samples_per_prompt != 1 and workload.samples_as == "one-request"
    several, has_ladder = profile.loads_per_server != 1, profile.per_server == "ladder"
    may_hit = workload.plans_hits or workload.allow_prefix_cache_hits
    arrival, begin, discard = workload.arrival, profile.load.begin, profile.load.discard
    turns, has_turns = workload.turns, workload.turns is not None
    rules: tuple[tuple[bool, Steps, str], ...] = (
        (
            profile.baseline not in variants,
            ("baseline" if "baseline" in profile.model_fields_set else "variants",),
            (
                f"the baseline {profile.baseline!r} is not a variant; variants are {', '.join(variants)}; "
                f"{did_you_mean(profile.baseline, variants) or 'add it, or name one of them in baseline'}"
            ),
        ),
        # Natural lengths are those of single answers, and serve to force lengths or to judge forced ones.
        (
            has_lengths and profile.stop == "natural",
            ("workload", "lengths_from"),
            "is not used with stop: natural; set stop to replay-natural or forced, or leave it out",
        ),
        (
            is_whole_request and (has_lengths or profile.stop == "replay-natural"),
            ("workload", "samples_per_prompt"),
            (
                f"is {workload.samples_per_prompt} in one request, whose natural lengths cannot be told apart; "
                "set samples_as: requests"
            ),
        ),
        (
            profile.stopping is not None
            and (profile.stopping.until == "precision") != bool(profile.stopping.precision),
            ("stopping", "precision"),
            "belongs to until: precision, which needs it; set it there, and leave it out with until: verdict",
        ),
        # A rule that can never be fulfilled: too few blocks for an interval, or nothing to compare.
        (
            has_looks and profile.blocks < LEAST_BLOCKS,
            ("blocks" if "blocks" in profile.model_fields_set else "stopping",),
            (
                f"is {profile.blocks}, and with stopping the first look is after {LEAST_BLOCKS} blocks; "
                "raise blocks, or leave out stopping"
            ),
        ),
        (
            has_looks and len(variants) == 1,
            ("stopping",),
            "has nothing to look at with one variant; add another, or leave out stopping",
        ),
        # Without a salt of its own the second load would find every prompt of the first.
        (
            (several or has_ladder) and may_hit and not _can_salt(profile),
            ("per_server" if has_ladder else "loads_per_server",),
            (
                f"is {'ladder' if has_ladder else profile.loads_per_server}, and the cache of engine {kind!r} "
                "cannot be emptied between loads; send one, or leave out workload.prefix, turns and "
                "allow_prefix_cache_hits"
            ),
        ),
        (
            several and not serves,
            ("loads_per_server",),
            f"is {profile.loads_per_server}, and engine {kind!r} serves no requests; leave it out",
        ),
        # Where a load begins: a closed loop takes slots over, an open one leaves its beginning out
        (
            begin == "running" and arrival.kind != "closed-loop",
            ("load", "begin"),
            f"is running, and an arrival of kind {arrival.kind} has no slots to take over; "
            + ("set load.discard instead" if arrival.is_open_loop else "set it to drained, or send a closed loop"),
        ),
        (
            discard > 0 and not arrival.is_open_loop,
            ("load", "discard"),
            f"is {discard:g}, and an arrival of kind {arrival.kind} has no plan of which a part could be left "
            "out; " + ("set load.begin: running instead" if arrival.kind == "closed-loop" else "remove it"),
        ),
        # Conversations: a slot is a user, who keeps it until the last answer
        (
            has_turns and dataset not in CONVERSATIONS,
            ("workload", "turns"),
            f"is set with dataset {dataset}, which has no conversations; choose {' or '.join(CONVERSATIONS)}",
        ),
        (
            turns is not None and turns.answers == "recorded" and dataset == "synthetic",
            ("workload", "turns", "answers"),
            "is recorded, and written conversations have no answers; set real, or dataset sharegpt",
        ),
        (
            has_turns and workload.samples_per_prompt != 1,
            ("workload", "samples_per_prompt"),
            f"is {workload.samples_per_prompt}, and a conversation goes on from one answer; leave it out",
        ),
        (
            has_turns and workload.repeat,
            ("workload", "repeat"),
            "is true, and conversations are not sent again; lower num_prompts, or name a file with more in path",
        ),
        (
            has_turns and begin == "running",
            ("load", "begin"),
            "is running, and users of conversations take over no slots; set it to drained",
        ),
        (
            has_turns and arrival.launch_rate_limit is not None,
            ("workload", "arrival", "launch_rate_limit"),
            "is set, and later turns are due when their users have thought; leave it out",
        ),
        (
            has_turns and arrival.is_open_loop and arrival.max_concurrency is not None,
            ("workload", "arrival", "max_concurrency"),
            (
                f"is {arrival.max_concurrency}, and users of conversations arrive when they are due; leave it out, "
                "or send a closed loop"
            ),
        ),
        (
            profile.slo is None
            and any(name.endswith((*SLO_METRICS, *CAPACITIES)) for name in profile.primary_metrics),
            ("primary_metrics",),
            (
                f"is {', '.join(profile.primary_metrics)}, and requests have no objective; "
                "set slo, such as {ttft_ms: 200}"
            ),
        ),
        (
            workload.prompts_per_slot is not None
            and ("workload", "arrival", "max_concurrency") not in map(setting_of, profile.sweep),
            ("workload", "prompts_per_slot"),
            "is read where sweep has max_concurrency; set num_prompts, or sweep that",
        ),
        (
            profile.slo is not None and not profile.slo.limits_ms,
            ("slo",),
            "names no limit; set ttft_ms, tpot_ms or e2el_ms",
        ),
        (
            profile.capacity is not None and 4 * profile.capacity.smallest > profile.capacity.largest,
            ("capacity",),
            "spans less than 4 times; a capacity lies between sizes",
        ),
        (
            profile.slo is not None and not serves,
            ("slo",),
            f"limits latencies of requests, and engine {kind!r} serves none; leave it out",
        ),
        (
            serves and dataset == NO_REQUESTS,
            ("workload", "dataset"),
            f"is none, and engine {kind!r} serves requests; choose a dataset, such as synthetic",
        ),
        (
            not serves and dataset != NO_REQUESTS,
            ("workload", "dataset"),
            f"is {value_text(dataset)}, and engine {kind!r} serves no requests; set dataset: none",
        ),
    )
    yield from ((path, problem) for is_broken, path, problem in rules if is_broken)


def _can_salt(profile: Profile) -> bool:
    """True where requests of every variant can carry a salt, without which a cache has nothing of them."""
    own = options_class(profile.engine.kind).model_fields.get("dialect")
    plain = profile.engine.kind if own is None else own.default
    spoken = {
        ({**profile.engine.options, **each.server}).get("dialect", plain) for each in profile.variants.values()
    }
    return all(each in ENGINES and ENGINES[each].cache_bypass == "cache_salt" for each in spoken)


def own_variable_problems(profile: Profile) -> Iterator[Problem]:
    """Variables of benchctl itself in the ``env`` of a server's options, which would be overwritten or do harm."""
    servers: dict[Steps, dict[str, Any]] = {("engine", "options"): profile.engine.options}
    servers |= {("variants", name, "server"): variant.server for name, variant in profile.variants.items()}
    for path, options in servers.items():
        env = options.get("env")
        for name in env if isinstance(env, dict) else ():
            if name.startswith(OWN_PREFIX):
                problem = f"benchctl sets this variable itself{_instead(name, profile.engine.kind)}"
                yield (*path, "env", name), problem


def _instead(name: str, kind: str) -> str:
    """The option of this kind of engine that a variable stands for, as a remedy."""
    options = [option for option in own_variables().get(name, ()) if option in options_class(kind).model_fields]
    if len(options) > 1 and options[0] in options_class(kind).VALUE_MODEL_OPTIONS:
        del options[0]  # it only says whether the variable is set at all
    if not options:
        return "; remove it"
    return f", from {', '.join(f'engine.options.{option}' for option in options)}; set that and remove the variable"


def sweep_problems(profile: Profile) -> Iterator[Problem]:
    """Factors, values and listed cells that cannot be, and more arms or runs than an experiment can have."""
    problems = [*_variant_problems(profile), *_factor_problems(profile), *_cell_problems(profile)]
    problems = problems or [*_load_factor_problems(profile), *_size_problems(profile)]
    yield from problems or (_ladder_problems(profile) if profile.per_server == "ladder" else ())


def _factor_problems(profile: Profile) -> Iterator[Problem]:
    sweep, writers = profile.sweep, dict[Steps, str]()
    takers = {factor: _takers(profile, factor) for factor in sweep}
    for factor, values in sweep.items():
        first = writers.setdefault(setting_of(factor), factor)
        repeated = [value for i, value in enumerate(values) if any(is_same(value, other) for other in values[:i])]
        if first != factor:
            yield ("sweep", factor), f"sets what {first} sets already; sweep one of the two"
        elif refusal := factor_problem(factor, profile.engine.kind):
            yield ("sweep", factor), refusal
        elif repeated:
            yield ("sweep", factor), f"lists {value_text(repeated[0])} twice; list each value once"
        if not takers[factor] and any(takers.values()):
            yield ("sweep", factor), "applies to no variant; name it in the swept of one, or remove it"
    if (num_cells := _number_of_cells(profile, sweep)) > MAX_CELLS:
        problem = f"has {num_cells:,} cells, more than {MAX_CELLS:,}; sweep fewer values, or split the profile"
        yield ("sweep",), problem


def _variant_problems(profile: Profile) -> Iterator[Problem]:
    """Factors that a variant names and the sweep lacks, guidance swept over a variant without any, an idle sweep.

    The second would silently guide a variant that was meant as a control.
    """
    sweep, is_applied = profile.sweep, False
    for name, variant in profile.variants.items() if sweep else ():
        factors, named = factors_of(profile, name), () if isinstance(variant.swept, bool) else variant.swept
        is_applied = is_applied or bool(factors or named)
        for factor in named:
            if factor not in sweep:
                problem = f"names {value_text(factor)}, which sweep does not have; it has {', '.join(sweep)}"
                yield ("variants", name, "swept"), problem
        for factor in factors if variant.guidance is None else ():
            setting = ".".join(setting_of(factor))
            if setting.startswith("guidance."):
                words = factor if factor == setting else f"{factor} ({setting})"
                problem = (
                    f"{words} is swept, but variant {name!r} has no guidance; "
                    f"give it a guidance section, or set variants.{name}.swept: false"
                )
                yield ("sweep", factor), problem
    if sweep and not is_applied:
        problem = (
            "applies to no variant; add a variant beside the baseline without 'swept: false', set sweep_baseline, "
            "or remove sweep"
        )
        yield ("sweep",), problem


def _takers(profile: Profile, factor: str) -> list[str]:
    """The variants that a factor applies to."""
    return [name for name in profile.variants if factor in factors_of(profile, name)]


def _load_factor_problems(profile: Profile) -> Iterator[Problem]:
    """Load factors that no load of this workload reads."""
    workload, kind = profile.workload, profile.workload.arrival.kind
    factors = {setting_of(factor)[-1]: factor for factor in profile.sweep if is_load_factor(factor)}
    rules: tuple[tuple[bool, str, str], ...] = (
        (
            kind not in RATED,
            "request_rate",
            f"arrival kind {kind} has no rate; set workload.arrival.kind: poisson, or sweep max_concurrency",
        ),
        (
            profile.stop != "forced",
            "output_len",
            "is read with stop: forced only; set it, or remove the factor",
        ),
        (
            profile.stop == "replay-natural" or workload.lengths_from is not None,
            "input_len",
            "natural lengths are those of one set of prompts; sweep max_concurrency or request_rate",
        ),
    )
    yield from ((("sweep", factors[key]), text) for is_broken, key, text in rules if is_broken and key in factors)


def _ladder_problems(profile: Profile) -> Iterator[Problem]:
    """A ladder of loads that a server cannot get, or that not every server would get whole."""
    points, cells = load_points(profile), {name: cells_of(profile, name) for name in profile.variants}
    servers = {name: {cell_name(server_part(cell)) for cell in cells[name]} for name in cells}
    uneven = [name for name in cells if len(cells[name]) != len(servers[name]) * len(points)]
    rules: tuple[tuple[bool, Steps, str], ...] = (
        (
            len(points) == 1,
            ("per_server",),
            "is ladder, and sweep has one load; sweep a load factor such as max_concurrency, or leave it out",
        ),
        (
            len(points) > MAX_LOADS,
            ("per_server",),
            f"makes {len(points)} loads on each server, more than {MAX_LOADS}; sweep fewer values",
        ),
        (
            bool(uneven),
            ("cells",),
            (
                f"with per_server: ladder every server gets the same loads, and those of {', '.join(uneven)} lack "
                "some; list them for each, or leave out cells"
            ),
        ),
        (
            profile.loads_per_server != 1,
            ("loads_per_server",),
            f"is {profile.loads_per_server}, and per_server: ladder sends each load once; leave out one of the two",
        ),
    )
    yield from ((path, problem) for is_broken, path, problem in rules if is_broken)


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
        for value in values:
            if not any(is_same(cell[factor], value) for cell in profile.cells):
                yield _takers(profile, factor)[0], {factor: value}


def _number_of_cells(profile: Profile, factors: Collection[str]) -> int:
    """The number of cells of these factors: the listed ones, or all combinations, which are not formed for it."""
    return (len(profile.cells) if factors else 0) or prod(len(profile.sweep[factor]) for factor in factors)


def _size_problems(profile: Profile) -> Iterator[Problem]:
    """More arms than an order can be made of, or more runs than a result directory can hold."""
    num_arms = sum(_number_of_cells(profile, factors_of(profile, name)) for name in profile.variants)
    num_runs = num_arms * profile.blocks
    rules: tuple[tuple[bool, Steps, str], ...] = (
        (
            num_arms > MAX_ARMS,
            ("sweep" if profile.sweep else "variants",),
            f"makes {num_arms:,} arms of the variants, more than {MAX_ARMS:,}; sweep fewer values",
        ),
        (
            num_runs > MAX_RUNS and num_arms <= MAX_ARMS,
            ("blocks",) if "blocks" in profile.model_fields_set else (),
            f"is {profile.blocks:,}, which makes {num_runs:,} runs, more than {MAX_RUNS:,}; lower it",
        ),
    )
    yield from ((path, problem) for is_broken, path, problem in rules if is_broken)
