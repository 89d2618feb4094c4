"""Orders of arms in blocks, and how far from balanced they are. Arm 0 is the baseline.

The imbalance of an experiment's order: of its plan, or of those of its runs that count.
From a profile to ordered runs: cells, blocks, the order within each, and the settings of each run.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from typing import Final, TypeAlias

from benchctl.errors import ProfileError
from benchctl.profile.errors import profile_error
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.settings import factor_problem, resolve, swept_cells
from benchctl.profile.yaml import Location, located
from benchctl.records.directory import arm_label, run_directory_name
from benchctl.records.record import Plan, PlannedRun
from benchctl.records.schema import SCHEMA_VERSION, Cell

Order: TypeAlias = tuple[int, ...]
"""The arms of one block, by position."""
_NUM_STARTS: Final = 30
"""Of the search for positions, which ends at the best possible; for 2 to 12 arms it always does."""
_NUM_TRIES: Final = 2
"""Of the search for rows in which few pairs of neighbours repeat."""


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
    shift = labels.index(0)
    named = [labels[(symbol + shift) % num_arms] for symbol in range(num_arms)]  # symbol 0 is the baseline
    chosen = [_labelled(row, named) for row in _chosen_rows(num_arms, rest)]
    return orders + stream.sample(chosen, rest)


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
    paired: dict[Order, None] = {}
    for row in sampled:
        paired |= {row: None, row[::-1]: None}
    return list(paired)


@cache
def _chosen_rows(num_arms: int, num_rows: int) -> tuple[Order, ...]:
    """The best rows found, fewer than a cycle has; symbol 0 is the baseline. The same for every caller."""
    stream = random.Random(f"{num_arms}:{num_rows}")  # noqa: S311  # no secret
    square = _williams_square(num_arms) if num_rows > num_arms else []
    num_more = num_rows - len(square)
    if num_more in {1, num_arms - 1}:
        return tuple(square + _one_or_nearly_all(num_arms, num_more, is_mirrored=bool(square)))
    positions = _position_sets(num_arms, num_more, stream)
    tries = [_fewer_repeats([*square, *_rows_of(positions, num_more, stream)]) for _ in range(_NUM_TRIES)]
    return min(tries, key=lambda rows: _repeats(_followers(rows)))


def _one_or_nearly_all(num_arms: int, num_rows: int, *, is_mirrored: bool) -> list[Order]:
    """One row of a Williams square, or all but one: that which has the baseline in the middle."""
    square = [row[::-1] if is_mirrored else row for row in _williams_square(num_arms)]
    middle = next(row for row in square if row[num_arms // 2] == 0)
    return [middle] if num_rows == 1 else [row for row in square if row != middle]


def _position_sets(num_arms: int, num_rows: int, stream: random.Random) -> list[set[int]]:
    """For each symbol the positions that it takes, each at most once; each position is taken ``num_rows`` times.

    The sums of positions are as equal as they can be, and that of symbol 0 lies in their middle.
    """
    best: list[set[int]] = []
    for _ in range(_NUM_STARTS):
        offsets = stream.sample(range(num_arms), num_rows)
        sets = [{(symbol + offset) % num_arms for offset in offsets} for symbol in range(num_arms)]
        while _exchange_positions(sets):
            pass
        best = min(best or sets, sets, key=_range_of_sums)
        if _range_of_sums(best) == num_rows * (num_arms - 1) % 2:  # sums are whole, their mean may be a half
            break
    middle = min(map(sum, best)) + max(map(sum, best))
    return sorted(best, key=lambda positions: abs(2 * sum(positions) - middle))


def _range_of_sums(sets: Iterable[set[int]]) -> int:
    sums = [sum(positions) for positions in sets]
    return max(sums) - min(sums)


def _exchange_positions(sets: Sequence[set[int]]) -> bool:
    """Let two symbols exchange one position such that their sums come nearer; False where no two can."""
    ordered = sorted(sets, key=sum)
    for high in reversed(ordered):
        for low in ordered:
            apart = sum(high) - sum(low)
            if apart < 2:  # nor are the rest further apart
                break
            gains = [(i, j) for i in high - low for j in low - high if 0 < i - j < apart]
            if gains:
                i, j = min(gains, key=lambda pair: (abs(2 * (pair[0] - pair[1]) - apart), pair))
                high ^= {i, j}
                low ^= {i, j}
                return True
    return False


def _rows_of(positions: Sequence[set[int]], num_rows: int, stream: random.Random) -> list[list[int]]:
    """Rows in which each symbol takes each of its positions once.

    They exist because every symbol has ``num_rows`` positions and every position as many symbols (D. König, 1916).
    """
    open_symbols = [[s for s, own in enumerate(positions) if p in own] for p in range(len(positions))]
    rows = []
    for _ in range(num_rows):
        for symbols in open_symbols:
            stream.shuffle(symbols)
        row = _matched(open_symbols)
        for position, symbol in enumerate(row):
            open_symbols[position].remove(symbol)
        rows.append(row)
    return rows


def _matched(open_symbols: Sequence[Sequence[int]]) -> list[int]:
    """A symbol for each position out of those open there, no symbol twice: augmenting paths (H. W. Kuhn)."""
    position_of: dict[int, int] = {}

    def assign(position: int, tried: set[int]) -> bool:
        for symbol in open_symbols[position]:
            if symbol in tried:
                continue
            tried.add(symbol)
            if symbol not in position_of or assign(position_of[symbol], tried):
                position_of[symbol] = position
                return True
        return False

    for position in range(len(open_symbols)):
        assign(position, set())
    return sorted(position_of, key=position_of.__getitem__)


def _followers(rows: Iterable[Sequence[int]]) -> Counter[tuple[int, int]]:
    """The number of times that each arm follows each other arm within a block."""
    return Counter(pair for row in rows for pair in pairwise(row))


def _repeats(followers: Counter[tuple[int, int]]) -> int:
    """Sum of squares: least where all pairs are equally frequent."""
    return sum(count * count for count in followers.values())


def _fewer_repeats(orders: Iterable[Sequence[int]]) -> tuple[Order, ...]:
    """Exchange parts of two rows that hold the same symbols, which moves no symbol to another position, as long as
    pairs of neighbours become more equally frequent.
    """
    rows = [list(order) for order in orders]
    followers = _followers(rows)
    while sum(
        _exchange_part(a, b, part, followers)
        for i, a in enumerate(rows)
        for b in rows[:i]
        for part in _exchangeable(a, b)
    ):
        pass
    return tuple(map(tuple, rows))


def _exchangeable(a: Sequence[int], b: Sequence[int]) -> list[list[int]]:
    """The smallest sets of positions at which both rows hold the same symbols, without those of one position."""
    where, left, parts = {symbol: position for position, symbol in enumerate(a)}, set(range(len(a))), []
    while left:
        part = [left.pop()]
        while (following := where[b[part[-1]]]) != part[0]:
            part.append(following)
            left.remove(following)
        if len(part) > 1:
            parts.append(part)
    return parts


def _exchange_part(a: list[int], b: list[int], part: Sequence[int], followers: Counter[tuple[int, int]]) -> bool:
    """Exchange the part where this makes fewer repeats; ``followers`` stays true."""
    if _swap(a, b, part, followers) < 0:
        return True
    _swap(a, b, part, followers)
    return False


def _swap(a: list[int], b: list[int], part: Iterable[int], followers: Counter[tuple[int, int]]) -> int:
    """Exchange the part and count anew; by how much ``_repeats`` grows."""
    growth = 0
    for pair in (*pairwise(a), *pairwise(b)):
        followers[pair] -= 1
        growth -= 2 * followers[pair] + 1
    for position in part:
        a[position], b[position] = b[position], a[position]
    for pair in (*pairwise(a), *pairwise(b)):
        growth += 2 * followers[pair] + 1
        followers[pair] += 1
    return growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """All three are 0 where the order is balanced."""

    position_difference: float
    """Largest distance between the mean position of an arm and that of the baseline in the same blocks. A machine
    that changes evenly while a block runs moves an uncorrected estimate by so many positions."""
    position_spread: int
    """How much oftener an arm runs in one position than in another, at most."""
    predecessor_spread: int
    """How much oftener one arm runs directly after a certain other arm than another pair does, at most."""

    @property
    def is_balanced(self) -> bool:
        return self == Imbalance(position_difference=0.0, position_spread=0, predecessor_spread=0)


def imbalance_of(runs: Iterable[PlannedRun], baseline: str) -> Imbalance:
    """The imbalance of ``runs``: a whole plan, or those that are left of it when blocks or runs do not count.

    ``baseline`` is the name of its variant. Positions are those of the plan; what ran before a run is the run in
    the position before, where it is one of ``runs``.
    """
    blocks: dict[int, dict[int, str]] = defaultdict(dict)
    baselines: set[str] = set()
    for run in runs:
        arm = arm_label(run.variant, run.cell)
        blocks[run.block][run.position] = arm
        if run.variant == baseline:
            baselines.add(arm)
    orders = list(blocks.values())
    arms = sorted({arm for order in orders for arm in order.values()})
    positions = Counter((arm, position) for order in orders for position, arm in order.items())
    predecessors = Counter(
        (order[earlier], order[later])
        for order in orders
        for earlier, later in pairwise(sorted(order))
        if later == earlier + 1
    )
    used = range(max((position for _, position in positions), default=-1) + 1)
    return Imbalance(
        position_difference=max((_mean_difference(orders, arm, baselines) for arm in arms), default=0.0),
        position_spread=max((_spread([positions[arm, p] for p in used]) for arm in arms), default=0),
        predecessor_spread=_spread([predecessors[a, b] for a in arms for b in arms if a != b]),
    )


def _mean_difference(orders: Iterable[Mapping[int, str]], arm: str, baselines: Iterable[str]) -> float:
    """The distance of the mean position of ``arm`` from that of the baseline, over the blocks that have both."""
    differences = []
    for order in orders:
        position_of = {name: position for position, name in order.items()}
        if arm in position_of:
            differences += [position_of[arm] - position_of[name] for name in baselines if name in position_of]
    return abs(sum(differences) / len(differences)) if differences else 0.0


def _spread(counts: Sequence[int]) -> int:
    return max(counts, default=0) - min(counts, default=0)


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
