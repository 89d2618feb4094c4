"""From a profile to ordered runs: cells, blocks, the order within each, and the settings of each run.

What runs in a block are its *arms*: the baseline once, or in every cell with ``sweep_baseline``, and every other
variant in every cell.
"""

import random
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

from benchctl.errors import ProfileError
from benchctl.profile.errors import profile_error
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning.balance import Order, balanced_orders
from benchctl.profile.planning.imbalance import imbalance_of
from benchctl.profile.settings import factor_problem, resolve, swept_cells
from benchctl.profile.sources.files import did_you_mean
from benchctl.profile.sources.located import Location, located
from benchctl.records.directory import arm_label, run_directory_name
from benchctl.records.manifest import Plan, PlannedRun
from benchctl.records.record import Cell
from benchctl.records.schema import SCHEMA_VERSION

Arm: TypeAlias = tuple[str, Cell]
"""A variant in a cell."""
_NUM_EXTENSIONS: Final = 40
"""Orders among which the blocks that are added to a plan are chosen."""


def arms(profile: Profile) -> tuple[Arm, ...]:
    """The arms of one block: the baseline first, then every other variant in its cells, as they are written."""
    names = sorted(profile.variants, key=lambda name: name != profile.baseline)
    return tuple((name, cell) for name in names for cell in _cells_of_variant(profile, name))


def _cells_of_variant(profile: Profile, name: str) -> tuple[Cell, ...]:
    if name == profile.baseline and not profile.sweep_baseline:
        return ({},)
    return swept_cells(profile.variants[name].swept, profile.sweep, profile.cells)


def variant_settings(profile: Profile, variant: str, cell: Cell) -> VariantSettings:
    """The settings of one run, all overrides applied and checked.

    Raises ProfileError for a variant or a factor that the profile does not have, and for settings that do not
    go together.
    """
    if variant not in profile.variants:
        hint = did_you_mean(variant, profile.variants) or f"variants are {', '.join(profile.variants)}"
        raise ProfileError(f"profile {profile.name}: no variant is called {variant!r}; {hint}")
    for factor in cell:
        problem = factor_problem(factor, profile.engine.kind)
        if problem:
            raise ProfileError(f"profile {profile.name}: {factor}: {problem}")
    values = {
        "model": profile.model,
        "engine": profile.engine.model_dump(mode="json"),
        "sampling": profile.sampling.model_dump(mode="json"),
        "request": profile.request.model_dump(mode="json"),
        "variants": {variant: profile.variants[variant].model_dump(mode="json")},
    }
    tree = located(values, Location(f"profile {profile.name}"))
    settings, errors = resolve(tree, profile.engine.kind, variant, cell)
    if settings is None:
        raise profile_error(errors)
    return settings


def plan_runs(profile: Profile) -> Plan:
    """All runs in the order of execution: complete blocks, whose orders are as balanced as their number allows.

    ``balance`` makes the orders; the stream ``"{seed}:plan"`` decides what is random in them.
    """
    return Plan(schema_version=SCHEMA_VERSION, runs=_runs_of(profile, _planned_orders(profile, profile.blocks)))


def extend_plan(plan: Plan, profile: Profile, num_blocks: int) -> Plan:
    """``plan`` with further blocks, up to ``num_blocks``; its own runs stay as they are.

    Where the plan of so many blocks begins with this one, it is that plan. Otherwise the new blocks are as balanced
    among themselves as their number allows, and, of many such orders, those that are most balanced with the old.
    ``plan`` holds whole blocks of the profile's arms.
    """
    contenders = arms(profile)
    indices = {arm_label(*arm): i for i, arm in enumerate(contenders)}
    labels = [arm_label(run.variant, run.cell) for run in plan.runs]
    num_arms, num_old = len(contenders), len(plan.runs) // len(contenders)
    old = [tuple(indices[label] for label in labels[i * num_arms : (i + 1) * num_arms]) for i in range(num_old)]
    as_one = _planned_orders(profile, num_blocks)
    if as_one[:num_old] == old:
        new = as_one[num_old:]
    else:
        streams = (random.Random(f"{profile.seed}:plan:{num_old}:{i}") for i in range(_NUM_EXTENSIONS))  # noqa: S311
        new = min(
            (balanced_orders(num_arms, num_blocks - num_old, stream) for stream in streams),
            key=lambda orders: _imbalance(profile, [*old, *orders]),
        )
    return Plan(schema_version=SCHEMA_VERSION, runs=(*plan.runs, *_runs_of(profile, new, first_block=num_old)))


def _planned_orders(profile: Profile, num_blocks: int) -> list[Order]:
    stream = random.Random(f"{profile.seed}:plan")  # noqa: S311  # no secret
    return balanced_orders(len(arms(profile)), num_blocks, stream)


def _imbalance(profile: Profile, orders: Sequence[Order]) -> tuple[int, float, int]:
    """The imbalance of orders, in order of importance (``balance``)."""
    imbalance = imbalance_of(_runs_of(profile, orders), profile.baseline)
    return imbalance.position_spread, imbalance.position_difference, imbalance.predecessor_spread


def _runs_of(profile: Profile, orders: Sequence[Order], first_block: int = 0) -> tuple[PlannedRun, ...]:
    """The runs of consecutive blocks, from ``first_block`` on."""
    contenders, runs = arms(profile), list[PlannedRun]()
    for block, order in enumerate(orders, start=first_block):
        for position, arm in enumerate(order):
            variant, cell = contenders[arm]
            index = first_block * len(contenders) + len(runs)
            run_id = run_directory_name(index, block, variant, cell)
            runs.append(
                PlannedRun(index=index, run_id=run_id, block=block, position=position, variant=variant, cell=cell)
            )
    return tuple(runs)


def allowed_difference(path: str, patterns: Iterable[str]) -> bool:
    """True where a setting may differ between variants: ``guidance.*`` covers all that is below ``guidance``."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)
