"""From a profile to ordered runs: arms and their settings, balanced orders of blocks, how balanced those are, and
the looks of a stopping rule.

Orders name arms by position; arm 0 is the baseline.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

from benchctl.errors import ProfileError
from benchctl.profile.checks import LEAST_BLOCKS
from benchctl.profile.errors import profile_error
from benchctl.profile.files import did_you_mean
from benchctl.profile.looks import look_alpha
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.settings import (
    cells_of,
    factor_problem,
    is_load_factor,
    load_points,
    resolved_settings,
    server_part,
    under_load,
)
from benchctl.profile.yaml import LocatedError, Location
from benchctl.records.directory import arm_label, run_directory_name
from benchctl.records.record import Plan, PlannedRun, StoppingRecord
from benchctl.records.schema import SCHEMA_VERSION, Cell

A = TypeVar("A")
Order: TypeAlias = tuple[int, ...]
"""The arms of one block, by position."""


def balanced_orders(num_arms: int, num_blocks: int, stream: random.Random) -> list[Order]:
    """The orders of consecutive blocks: whole Williams cycles, then the best rows for what remains.

    ``stream`` decides which arm is which symbol, and the order of the rows. Two arms alternate AB, BA, AB, BA.
    """
    labels = stream.sample(range(num_arms), num_arms)
    cycle = [_labelled(row, labels) for row in _williams_cycle(num_arms, stream)]
    num_whole, rest = divmod(num_blocks, len(cycle))
    orders = cycle * num_whole
    # No rows are better than whole squares and pairs of mirrored rows.
    if num_arms <= 2 or rest % num_arms == 0 or (num_arms % 2 == 0 and rest % 2 == 0):
        return orders + cycle[:rest]
    named = [0, *(label for label in labels if label)]  # symbol 0 is the baseline
    rows = [_labelled(row, named) for row in _best_rows(num_arms, rest)]
    return orders + stream.sample(rows, rest)


def balanced_numbers(num_arms: int, num_blocks: int) -> tuple[int, int]:
    """The numbers of blocks nearest to ``num_blocks``, below (0: none) and above, that make whole cycles."""
    length = cycle_length(num_arms)
    below = num_blocks // length * length
    return below, below + length


def cycle_length(num_arms: int) -> int:
    """Blocks after which all is balanced: as many as arms, or twice as many where their number is odd."""
    return num_arms if num_arms % 2 == 0 or num_arms == 1 else 2 * num_arms


def _labelled(row: Iterable[int], labels: Sequence[int]) -> Order:
    return tuple(labels[symbol] for symbol in row)


def _williams_square(num_arms: int) -> list[Order]:
    """Row r is ``(r + z_j) mod n`` for the zigzag z = 0, 1, n-1, 2, n-2, ...: each symbol once in each position."""
    zigzag = [(j + 1) // 2 if j % 2 else -(j // 2) for j in range(num_arms)]
    return [tuple((row + step) % num_arms for step in zigzag) for row in range(num_arms)]


def _williams_cycle(num_arms: int, stream: random.Random) -> list[Order]:
    """The rows over which each arm follows each other equally often.

    For even n these are one square, where each row is followed by its mirror image, which is a row, too: mean
    positions are equal after every second block. For odd n they are the square and then its mirror image.
    """
    square = _williams_square(num_arms)
    if num_arms == 1:
        return square
    sampled = stream.sample(square, num_arms)
    if num_arms % 2:
        return sampled + stream.sample([row[::-1] for row in square], num_arms)
    return list(dict.fromkeys(each for row in sampled for each in (row, row[::-1])))


@cache
def _best_rows(num_arms: int, num_rows: int) -> list[Order]:
    """Of shuffled rows of a Williams square, fewer than a cycle has, those with the least imbalance.

    Symbol 0 is the baseline. The rows are the same for every caller.
    """
    stream = random.Random(f"{num_arms}:{num_rows}")  # noqa: S311  # no secret
    square = _williams_square(num_arms)
    whole, others = ([], square) if num_rows < num_arms else (square, [row[::-1] for row in square])

    def shuffled() -> list[Order]:
        shift = stream.randrange(num_arms)  # another symbol is the baseline
        rows = [*whole, *stream.sample(others, num_rows - len(whole))]
        return [tuple((symbol + shift) % num_arms for symbol in row) for row in rows]

    # The best of so many leaves positions three apart at most
    return min((shuffled() for _ in range(200)), key=lambda rows: _imbalance(rows, {0}))


class Imbalance(NamedTuple):
    """Figures in order of importance, which are 0 where the order is balanced."""

    position_spread: int
    """How much oftener an arm runs in one position than in another, at most."""
    position_difference: float
    """Largest distance between the mean position of an arm and that of the baseline in the same blocks. A machine
    that changes evenly while a block runs moves an uncorrected estimate by so many positions."""
    predecessor_spread: int
    """How much oftener one arm runs directly after a certain other arm than another pair does, at most."""

    @property
    def is_balanced(self) -> bool:
        return not any(self)


def imbalance_of(runs: Iterable[PlannedRun], baseline: str) -> Imbalance:
    """The imbalance of ``runs``: a whole plan, or those that are left of it when blocks or runs do not count.

    ``baseline`` is the name of its variant. Positions are those of the plan; what ran before a run is the run in
    the position before, where it is one of ``runs``.
    """
    blocks, baselines = defaultdict[int, dict[int, str]](dict), set[str]()
    for run in runs:
        blocks[run.block][run.position] = arm = arm_label(run.variant, run.cell)
        if run.variant == baseline:
            baselines.add(arm)
    length = 1 + max((position for block in blocks.values() for position in block), default=-1)
    return _imbalance([[block.get(i) for i in range(length)] for block in blocks.values()], baselines)


def _imbalance(orders: Sequence[Sequence[A | None]], baselines: set[A]) -> Imbalance:
    """The imbalance of orders of one length, in which None stands for a run that is missing."""
    positions: Counter[tuple[A, int]] = Counter()
    predecessors: Counter[tuple[A, A]] = Counter()
    differences: dict[A, list[int]] = defaultdict(list)
    for order in orders:
        filled = [(arm, position) for position, arm in enumerate(order) if arm is not None]
        positions.update(filled)
        predecessors.update((a, b) for a, b in pairwise(order) if a is not None and b is not None)
        of_baselines = [position for arm, position in filled if arm in baselines]
        for arm, position in filled:
            differences[arm] += [position - other for other in of_baselines]
    num_arms, length = len(differences), len(orders[0]) if orders else 0
    return Imbalance(
        position_spread=max(
            (_spread([positions[arm, i] for i in range(length)]) for arm in differences), default=0
        ),
        position_difference=max((abs(sum(each) / len(each)) for each in differences.values() if each), default=0.0),
        predecessor_spread=_spread(
            [*predecessors.values(), *([0] if len(predecessors) < num_arms * (num_arms - 1) else [])]
        ),
    )


def _spread(counts: Sequence[int]) -> int:
    return max(counts, default=0) - min(counts, default=0)


Arm: TypeAlias = tuple[str, Cell]
"""A variant in a cell."""


def arms(profile: Profile) -> tuple[Arm, ...]:
    """The arms of one block: the baseline first, then every other variant in its cells, as they are written."""
    names = sorted(profile.variants, key=lambda name: name != profile.baseline)
    return tuple((name, cell) for name in names for cell in cells_of(profile, name))


def servers(profile: Profile) -> tuple[Arm, ...]:
    """The arms for which a block starts a server: all, or, with a ladder of loads, those under one load."""
    return arms(profile if profile.per_server == "fresh" else under_load(profile, load_points(profile)[0]))


def server_of(profile: Profile, variant: str, cell: Cell) -> Arm:
    """The server that an arm is measured on, as ``servers`` has it."""
    return variant, server_part(cell) if profile.per_server == "ladder" else cell


def variant_settings(profile: Profile, variant: str, cell: Cell) -> VariantSettings:
    """The settings of one run, all overrides applied and checked.

    Raises ProfileError for a variant or a factor that the profile does not have, and for settings that do not
    go together.
    """
    if variant not in profile.variants:
        hint = did_you_mean(variant, profile.variants) or f"variants are {', '.join(profile.variants)}"
        raise ProfileError(f"profile {profile.name}: no variant is called {variant!r}; {hint}")
    settings, problems = resolved_settings(profile, variant, cell)
    if settings is None:
        unknown = ((factor, factor_problem(factor, profile.engine.kind)) for factor in cell)
        problems = [((factor,), problem) for factor, problem in unknown if problem] or problems
        raise profile_error(
            LocatedError(Location(f"profile {profile.name}", path=path), text) for path, text in problems
        )
    return settings


def plan_runs(profile: Profile) -> Plan:
    """All runs in the order of execution: complete blocks, whose orders are as balanced as their number allows.

    The stream ``"{seed}:plan"`` decides what is random in them, ``"{seed}:ladder"`` in the orders of load points.
    """
    orders = _continued((), len(servers(profile)), profile.blocks, f"{profile.seed}:plan", set())
    return Plan(schema_version=SCHEMA_VERSION, runs=_runs_of(profile, orders, _ladders(profile, profile.blocks)))


def extend_plan(plan: Plan, profile: Profile, num_blocks: int) -> Plan:
    """``plan`` with further blocks, up to ``num_blocks``; its own runs stay as they are.

    Where the plan of so many blocks begins with this one, it is that plan. Otherwise the new blocks are as balanced
    among themselves as their number allows, and, of many such orders, those that are most balanced with the old.
    ``plan`` holds whole blocks of the profile's arms.
    """
    contenders = servers(profile)
    indices = {arm_label(*arm): i for i, arm in enumerate(contenders)}
    labels = [arm_label(run.variant, run.cell) for run in plan.runs]
    num_arms, num_old = len(contenders), len(plan.runs) // len(contenders)
    old = [tuple(indices[label] for label in labels[i * num_arms : (i + 1) * num_arms]) for i in range(num_old)]
    of_baseline = {i for i, (variant, _) in enumerate(contenders) if variant == profile.baseline}
    new = _continued(old, num_arms, num_blocks, f"{profile.seed}:plan", of_baseline)
    ladders = _ladders(profile, num_blocks, [run.ladder for run in plan.runs[::num_arms]])
    runs = _runs_of(profile, new, ladders, first_block=num_old)
    return Plan(schema_version=SCHEMA_VERSION, runs=(*plan.runs, *runs))


def _continued(
    old: Sequence[Order], num_arms: int, num_blocks: int, stream: str, of_baseline: set[int]
) -> list[Order]:
    """The orders of the blocks behind ``old`` ones, up to ``num_blocks``; ``stream`` names that of one plan."""
    as_one = balanced_orders(num_arms, num_blocks, random.Random(stream))  # noqa: S311  # no secret
    if as_one[: len(old)] == [*old]:
        return as_one[len(old) :]
    # Orders among which the blocks that are added to a plan are chosen
    streams = (random.Random(f"{stream}:{len(old)}:{i}") for i in range(40))  # noqa: S311
    return min(
        (balanced_orders(num_arms, num_blocks - len(old), each) for each in streams),
        key=lambda orders: _imbalance([*old, *orders], of_baseline),
    )


def _ladders(profile: Profile, num_blocks: int, old: Sequence[tuple[Cell, ...]] = ()) -> list[tuple[Cell, ...]]:
    """The load points of the servers of each block behind ``old`` ones, in order; none where a server gets one."""
    if profile.per_server == "fresh":
        return [()] * (num_blocks - len(old))
    points = load_points(profile)
    old_orders = [tuple(map(points.index, ladder)) for ladder in old]
    orders = _continued(old_orders, len(points), num_blocks, f"{profile.seed}:ladder", set())
    return [tuple(points[i] for i in order) for order in orders]


def _runs_of(
    profile: Profile, orders: Sequence[Order], ladders: Sequence[tuple[Cell, ...]], first_block: int = 0
) -> tuple[PlannedRun, ...]:
    """The runs of consecutive blocks, from ``first_block`` on, each with the load points of its block."""
    contenders = servers(profile)
    planned = [
        (block, position, *contenders[arm])
        for block, order in enumerate(orders, start=first_block)
        for position, arm in enumerate(order)
    ]
    return tuple(
        PlannedRun(
            index=index,
            run_id=run_directory_name(index, block, variant, cell),
            block=block,
            position=position,
            variant=variant,
            cell=cell,
            ladder=ladders[block - first_block],
        )
        for index, (block, position, variant, cell) in enumerate(planned, start=first_block * len(contenders))
    )


def allowed_difference(path: str, patterns: Iterable[str]) -> bool:
    """True where a setting may differ between variants: ``guidance.*`` covers all that is below ``guidance``."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


ALPHA = 0.05
"""Chance that any look of a stopping rule calls a change where there is none."""


PILOT_BLOCKS = 2
"""The first blocks of ``loads_per_server: auto``, by which the number of loads is chosen."""


def several_loads_hint(profile: Profile) -> str:
    """The end of a sentence about servers that take longer to start than their load; empty with several loads."""
    if profile.per_server == "ladder" or profile.num_loads > 1:
        return ""
    if len(load_points(profile)) > 1:
        return "; per_server=ladder sends all loads of an arm to one server"
    return "; loads_per_server=auto sends as many loads to each as pay"


def stopping_rule(profile: Profile) -> StoppingRecord | None:
    """The rule of a profile, before any look; None where the number of blocks is fixed."""
    if profile.stopping is None:
        return None
    looks = look_blocks(profile.blocks, profile.stopping.looks)
    early, last = (1 - look_alpha(ALPHA, len(looks), looks[-1], is_last=is_last) for is_last in (False, True))
    return StoppingRecord(
        precision_frac=profile.stopping.precision, confidence=early, last_confidence=last, look_blocks=looks
    )


def look_blocks(most: int, num_looks: int) -> tuple[int, ...]:
    """Numbers of blocks after which there is a look: evenly spaced from 6 to ``most``.

    Invariants: strictly increasing, the last is ``most``, at most ``num_looks`` of them.
    """
    first = min(LEAST_BLOCKS, most)
    if num_looks == 1:
        return (most,)
    apart = (most - first) / (num_looks - 1)
    return tuple(sorted({first + math.floor(i * apart + 0.5) for i in range(num_looks)}))


def is_repeated_baseline(profile: Profile) -> bool:
    """True for an A/A experiment: every variant is the baseline under another name."""
    if len(profile.variants) == 1 or not all(map(is_load_factor, profile.sweep)):
        return False
    settings = [variant_settings(profile, name, {}).model_dump(exclude={"variant"}) for name in profile.variants]
    return all(of_arm == settings[0] for of_arm in settings)
