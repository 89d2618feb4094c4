"""Compute the table of ``profile/looks.py`` by simulation, print it as source, and hold it against the truth.

Statistics are Student's t of cumulative blocks with normal noise, with the effect of the position known (n - 1
degrees of freedom) or estimated from the same blocks (n - 2): sums and sums of squares of the blocks between two
looks are drawn from their exact distributions, so that a thousand blocks cost as much as six. The share of a look
is the quantile of the least p-value over all looks, each divided by the weight of its look.

    python -m benchmarks.verdict.look_levels table      the table, as source
    python -m benchmarks.verdict.look_levels normal     against published constants of normal statistics
    python -m benchmarks.verdict.look_levels shapes     what other shapes of boundaries cost
    python -m benchmarks.verdict.look_levels anytime    the widths of intervals that hold at any number of blocks
    python -m benchmarks.verdict.look_levels check      how often any look misses, for many plans
    python -m benchmarks.verdict.look_levels robust     the same by the real estimates

The same output each time. ``check`` and ``robust`` end with exit code 1 where more than 5 % is certain.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import scipy
from numpy.typing import NDArray

from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.profile.looks import look_alpha, look_weights
from benchctl.profile.planning import look_blocks
from benchmarks.common.harness import show
from benchmarks.verdict.known_truth import named_stream
from benchmarks.verdict.shares import SELDOM, Share

Floats: TypeAlias = NDArray[np.float64]

NUMBERS: Final = (2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20)
COLUMNS: Final = (12, 24, 48, 100, 1_000_000)
"""Most blocks of a plan; the last stands for any number."""
SMALL_ALPHA: Final = 0.01
POCOCK: Final = {2: 2.178, 3: 2.289, 4: 2.361, 5: 2.413, 6: 2.453, 8: 2.512, 10: 2.555, 20: 2.672}
"""Critical values of normal statistics with the same level at each look, two-sided 5 %: C. Jennison, B. W.
Turnbull, *Group Sequential Methods with Applications to Clinical Trials*, Chapman & Hall 1999, table 2.1."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """A look at a change of 0 in every draw, in standard deviations of a block."""

    centres: Floats
    standard_errors: Floats
    degrees_of_freedom: int

    def p_values(self) -> Floats:
        t = np.abs(self.centres) / self.standard_errors
        p: Floats = 2 * scipy.special.stdtr(self.degrees_of_freedom, -t)
        return p


def statistics(looks: Sequence[int], draws: int, *, is_own_slope: bool, name: object = "") -> Iterator[Statistic]:
    """The statistic of each look, cumulative over blocks whose positions are +1 and -1 in turn."""
    stream = named_stream("looks", name, looks, is_own_slope)
    sums, squares, before = np.zeros((2, draws)), np.zeros((2, draws)), (0, 0)
    for look in looks:
        counts = (look + 1) // 2, look // 2
        for side, (now, then) in enumerate(zip(counts, before, strict=True)):
            if new := now - then:
                means = stream.normal(0, 1 / math.sqrt(new), draws)
                sums[side] += new * means
                squares[side] += new * means**2 + (stream.chisquare(new - 1, draws) if new > 1 else 0)
        before = counts
        sizes = np.array(counts)[:, None]
        if is_own_slope:
            df = look - 2
            rest, spread = (squares - sums**2 / sizes).sum(axis=0), sum(1 / size for size in counts) / 4
            centres = (sums / sizes).mean(axis=0)
        else:
            df = look - 1
            centres = sums.sum(axis=0) / look
            rest, spread = squares.sum(axis=0) - look * centres**2, 1 / look
        yield Statistic(centres, np.sqrt(rest / df * spread), df)


def p_values(looks: Sequence[int], draws: int, *, is_own_slope: bool, name: object = "") -> Floats:
    """A row of p-values for each look."""
    return np.array([s.p_values() for s in statistics(looks, draws, is_own_slope=is_own_slope, name=name)])


def share_of(p: Floats, weights: Sequence[float], alpha: float) -> float:
    """The e for which any p of a look is below e times its weight in the share ``alpha`` of the draws."""
    return float(np.quantile(np.min(p / np.array(weights)[:, None], axis=0), alpha))


def share(num_looks: int, most: int, alpha: float, draws: int) -> float:
    """The least e of both kinds of degrees of freedom, over the level of all looks together."""
    looks = look_blocks(max(most, num_looks + 5), num_looks)
    of_both = (p_values(looks, draws, is_own_slope=is_own) for is_own in (False, True))
    return min(share_of(p, look_weights(num_looks), alpha) for p in of_both) / alpha


def table(draws: int) -> int:
    """Print the table as source, rounded down."""
    for num_looks in NUMBERS:
        shares = [share(num_looks, most, 0.05, draws) for most in COLUMNS]
        floored = ", ".join(f"{math.floor(1000 * each) / 1000:.3f}" for each in shares)
        small = math.floor(1000 * share(num_looks, COLUMNS[-1], SMALL_ALPHA, draws)) / 1000
        print(f"    {num_looks}: ({floored}, {small:.3f}),", flush=True)
    return 0


def normal(draws: int) -> int:
    """Equal levels at looks that are evenly spaced from the first on, with ever more blocks."""
    rows = []
    for num_looks, published in POCOCK.items():
        row = {"looks": str(num_looks), "published": f"{published:.3f}"}
        for apart in (6, 20, 100, 10_000):
            looks = tuple(apart * (k + 1) for k in range(num_looks))
            level = share_of(p_values(looks, draws, is_own_slope=False), (1.0,) * num_looks, 0.05)
            row[f"{apart} blocks apart"] = f"{-scipy.special.ndtri(level / 2):.3f}"
        rows.append(row)
    show(rows, "normal quantile of the level of each look: equal levels, all looks together 5 %")
    return 0


def wang_tsiatis(power: float) -> Callable[[Floats, Floats], Floats]:
    """Levels of the boundary C * t^(power - 1/2) of normal statistics, t the part of the blocks: 0 is O'Brien and
    Fleming's."""

    def levels(p: Floats, parts: Floats) -> Floats:
        low, high = 1.5, 4.5
        for _ in range(30):
            middle = (low + high) / 2
            bounds = 2 * scipy.special.ndtr(-middle * parts ** (power - 0.5))
            misses = np.mean(np.any(p < bounds[:, None], axis=0))
            low, high = (middle, high) if misses > 0.05 else (low, middle)
        found: Floats = 2 * scipy.special.ndtr(-high * parts ** (power - 0.5))
        return found

    return levels


def kim_demets(power: float) -> Callable[[Floats, Floats], Floats]:
    """Levels that spend 5 % times t^power of the error by each look."""

    def levels(p: Floats, parts: Floats) -> Floats:
        is_open, spent, found = np.ones(p.shape[1], dtype=bool), 0.0, []
        for own, part in zip(p, parts, strict=True):
            still_open = np.sort(own[is_open])
            found.append(still_open[int((0.05 * part**power - spent) * p.shape[1])])
            spent = 0.05 * part**power
            is_open &= own > found[-1]
        return np.array(found)

    return levels


SHAPES: Final[dict[str, Callable[[Floats, Floats], Floats]]] = {
    "Bonferroni": lambda p, _: np.full(len(p), 0.05 / len(p)),
    "Pocock": lambda p, _: np.full(len(p), share_of(p, [1.0] * len(p), 0.05)),
    "Wang-Tsiatis 0.25": wang_tsiatis(0.25),
    "O'Brien-Fleming": wang_tsiatis(0.0),
    "Kim-DeMets 1": kim_demets(1.0),
    "Kim-DeMets 2": kim_demets(2.0),
    "chosen": lambda p, _: share_of(p, look_weights(len(p)), 0.05) * np.array(look_weights(len(p))),
}
MARGIN: Final = 0.01


def shapes(draws: int) -> int:
    """Expected blocks until a verdict, of two arms in turn, for changes of 0, 1, 2 and 5 margins of 1 %."""
    for most, num_looks in ((12, 4), (24, 4), (48, 4), (24, 8), (100, 10)):
        looks, rows = look_blocks(most, num_looks), []
        seen = list(statistics(looks, draws, is_own_slope=True, name="shapes"))
        p = np.array([statistic.p_values() for statistic in seen])
        for name, levels_of in SHAPES.items():
            levels = levels_of(p, np.array(looks) / most)
            quantiles = [
                -scipy.special.stdtrit(s.degrees_of_freedom, a / 2) for s, a in zip(seen, levels, strict=True)
            ]
            row = {"shape": name, "first": f"{levels[0]:.4f}", "last": f"{levels[-1]:.4f}"}
            row["width"] = f"{quantiles[-1] / scipy.special.stdtrit(most - 2, 0.975):.2f}"
            for scatter in (0.005, 0.01, 0.02):
                ends = [_blocks_to_verdict(seen, quantiles, looks, scatter, by * MARGIN) for by in (0, 1, 2, 5)]
                row[f"scatter {scatter:.1%}"] = " / ".join(f"{each:.1f}" for each in ends)
            rows.append(row)
        show(rows, f"at most {most} blocks, looks after {', '.join(map(str, looks))}; width against a fixed number")
    return 0


def _blocks_to_verdict(
    seen: Sequence[Statistic], quantiles: Sequence[float], looks: Sequence[int], scatter: float, change: float
) -> float:
    ends = np.full(len(seen[0].centres), looks[-1])
    for look, statistic, quantile in reversed(list(zip(looks, seen, quantiles, strict=True))):
        centre, half = change + scatter * statistic.centres, quantile * scatter * statistic.standard_errors
        is_decided = (np.abs(centre) - half > MARGIN) | (np.abs(centre) + half <= MARGIN)
        ends[is_decided] = look
    return float(ends.mean())


def anytime(_draws: int) -> int:
    """Half-widths in standard errors, for four looks of 24 blocks, beside a confidence sequence for t statistics.

    M. Lindon, D. W. Ham, M. Tingley, I. Bojinov, arXiv 2210.08589: with r = phi / (phi + n) and c = (alpha^2
    r)^(1 / n), t^2 = (n - 1) (1 - c) / (c - r); phi is a parameter, either the best one for each n or one for all.
    """

    def half_width(n: int, phi: float) -> float:
        r = phi / (phi + n)
        c = (0.05**2 * r) ** (1 / n)
        return math.inf if c <= r else math.sqrt((n - 1) * (1 - c) / (c - r))

    rows = []
    for n in (6, 8, 12, 16, 24):
        early, last = (
            float(-scipy.special.stdtrit(n - 1, look_alpha(0.05, 4, 24, is_last=is_last) / 2))
            for is_last in (False, True)
        )
        best = min(half_width(n, 10 ** (k / 20)) for k in range(-60, 60))
        rows.append(
            {"blocks": str(n), "fixed": f"{scipy.special.stdtrit(n - 1, 0.975):.2f}", "early look": f"{early:.2f}"}
            | {"last look": f"{last:.2f}", "anytime, best phi": f"{best:.2f}", "phi 1": f"{half_width(n, 1):.2f}"}
            | {"ratio to an early look": f"{best / early:.2f}"}
        )
    show(rows, "half-widths in standard errors, n - 1 degrees of freedom")
    return 0


def check(draws: int) -> int:
    """How often any look misses, over all numbers of looks and many numbers of blocks, on streams of their own."""
    rows, is_wrong = [], False
    numbers = (
        6,
        7,
        8,
        9,
        10,
        11,
        12,
        13,
        15,
        18,
        20,
        24,
        25,
        30,
        36,
        48,
        49,
        60,
        80,
        100,
        101,
        150,
        250,
        500,
        1000,
    )
    for num_planned in range(1, 21):
        worst = (0.0, 0, False)
        for most in numbers:
            looks = look_blocks(most, num_planned)
            levels = [look_alpha(0.05, len(looks), most, is_last=look == most) for look in looks]
            for is_own in (False, True):
                p = p_values(looks, draws, is_own_slope=is_own, name=f"check {num_planned}")
                misses = float(np.mean(np.any(p < np.array(levels)[:, None], axis=0)))
                worst = max(worst, (misses, most, is_own))
        is_wrong |= worst[0] > 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)
        rows.append(
            {"looks": str(num_planned), "most": f"{100 * worst[0]:.2f} %", "with blocks": str(worst[1])}
            | {"position effect": "estimated" if worst[2] else "known"}
        )
    show(rows, f"misses of any look, {draws} draws of each of {len(numbers)} numbers of blocks: the largest share")
    return int(is_wrong)


def robust(draws: int) -> int:
    """The same by ``estimate_paired``: robust, and the mean, with the effect of the position removed."""
    rows, is_wrong = [], False
    for most, num_looks in ((8, 3), (12, 4), (12, 7), (24, 4), (24, 10), (48, 2), (48, 8), (100, 4), (60, 20)):
        looks, stream = look_blocks(most, num_looks), named_stream("robust looks", most, num_looks)
        positions = [1.0 if block % 2 else -1.0 for block in range(most)]
        blocks = stream.normal(size=(draws, most)).tolist()
        levels = {look: look_alpha(0.05, len(looks), most, is_last=look == most) for look in looks}
        row = {"most blocks": str(most), "looks": str(len(looks))}
        for name, estimator, removed in (
            ("robust, two arms", "robust", positions),
            ("robust, no positions", "robust", None),
            ("mean, two arms", "mean", positions),
        ):
            misses = 0
            for values in blocks:
                for look, level in levels.items():
                    own = None if removed is None else removed[:look]
                    estimate = estimate_paired(values[:look], 1 - level, own, estimator=estimator)
                    low, high = estimate.log_interval or (-math.inf, math.inf)
                    if not low <= 0.0 <= high:
                        misses += 1
                        break
            row[name] = str(Share(misses, draws))
            is_wrong |= not SELDOM.is_met(Share(misses, draws))
        rows.append(row)
        print(row, flush=True)
    show(rows, f"misses of any look by the real estimates, {draws} experiments of normal noise for each row")
    return int(is_wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {
        "table": table,
        "normal": normal,
        "shapes": shapes,
        "anytime": anytime,
        "check": check,
        "robust": robust,
    }
    defaults = {"table": 800_000, "normal": 800_000, "shapes": 100_000, "check": 100_000, "robust": 2_000}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--draws", type=int, metavar="N", help="for each row")
    asked = parser.parse_args()
    sys.exit(parts[asked.part](asked.draws or defaults.get(asked.part, 0)))


if __name__ == "__main__":
    main()
