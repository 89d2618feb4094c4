"""Rules that end for a verdict, on experiments of which the truth is known: how often they err, what they save.

Orders, estimates, verdicts, levels and chances are those of benchctl; only the values are made
(``named_noise.py``). A verdict is false where it calls a change that is not beyond the margin, or equivalent where
the change is; on the margin itself both count. Shares are in per cent of the experiments, with the 95 % interval of
Clopper and Pearson; ``blocks`` are the mean of those measured. Ends with exit code 1 when false verdicts are
certainly more than 5 %. The same output every time.

    python -m benchmarks.verdict.looks_truth [--experiments N] [--sections NAME...]
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Final

from benchctl.analysis.compare.decide import chance_of_verdict, margins_of
from benchctl.analysis.compare.looks import FUTILE_BELOW
from benchctl.analysis.statistics.estimate import RatioEstimate, estimate_paired
from benchctl.analysis.statistics.robust import OutlierMixture, credibility_of
from benchctl.profile.looks import look_alpha
from benchctl.profile.planning import ALPHA, look_blocks
from benchmarks.common.harness import show
from benchmarks.verdict.known_truth import CHANGES, Experiment, Made, first_blocks, judge, make, named_stream
from benchmarks.verdict.named_noise import ALL
from benchmarks.verdict.shares import SELDOM, Share
from benchmarks.verdict.verdict_truth import block_logs, distances

NUM_LOOKS: Final = 4
MARGIN: Final = 0.01
TRUTHS: Final = (0.0, 0.01, 0.02, 0.05)


@dataclass(frozen=True, slots=True)
class End:
    """How a rule ended an experiment."""

    num_blocks: int
    verdicts: tuple[str, ...]

    def is_false(self, change_frac: float) -> bool:
        calls, is_equivalent = any(v in CHANGES for v in self.verdicts), "equivalent" in self.verdicts
        if change_frac > MARGIN:
            return is_equivalent or "improvement" in self.verdicts
        return calls or (is_equivalent and change_frac == MARGIN)

    @property
    def is_open(self) -> bool:
        return "inconclusive" in self.verdicts


Seen = Sequence[tuple[int, RatioEstimate]]
"""The blocks and the estimate of each look, to the end of an experiment."""
MARGINS: Final = margins_of(MARGIN)


def verdict_at(estimate: RatioEstimate, level: float) -> str:
    """``verdict_of`` of the interval of 1 - level, without its ends: by what lies below each margin."""
    mixture = estimate.uncertainty
    assert isinstance(mixture, OutlierMixture)
    tail = credibility_of(level, mixture.calibration) / 2
    below_low, below_high = (mixture.below(end) for end in (-MARGINS.log_change, MARGINS.log_change))
    if below_low < tail and 1 - below_high < tail:
        return "equivalent"
    return "regression" if below_high < tail else "improvement" if 1 - below_low < tail else "inconclusive"


def until_verdict(seen: Seen, levels: Sequence[float]) -> End:
    """At the first look with a verdict at its level, else at the last."""
    ends = [End(num, (verdict_at(estimate, level),)) for (num, estimate), level in zip(seen, levels, strict=True)]
    return next((end for end in ends if not end.is_open), ends[-1])


def until_hopeless(seen: Seen, levels: Sequence[float]) -> End:
    """The same, or at the first look with no chance of a verdict at the last."""
    end, (most, _) = until_verdict(seen, levels), seen[-1]
    for num, estimate in seen[:-1]:
        is_before = num < end.num_blocks
        if is_before and chance_of_verdict(estimate, MARGINS, most, 1 - levels[-1]) < FUTILE_BELOW:
            return End(num, ("inconclusive",))
    return end


def looked_at(experiment: Experiment, looks: Sequence[int]) -> Seen:
    """The estimates of the two arms of an experiment, as ``judge`` makes them."""
    logs, positions = block_logs(experiment), distances(experiment)
    return [(num, estimate_paired(logs[:num], 0.95, positions[:num])) for num in looks]


def check_shortcut(experiment: Experiment, made: Made, seen: Seen, level: float) -> None:
    """Raises AssertionError where estimates and verdicts are not those of a comparison."""
    for num, estimate in seen:
        (metric,) = judge(first_blocks(experiment, num), replace(made, num_blocks=num), 1 - level)
        assert metric.verdict == verdict_at(estimate, level), (num, level, made)


def levels_of(looks: Sequence[int]) -> list[float]:
    return [look_alpha(ALPHA, len(looks), looks[-1], is_last=look == looks[-1]) for look in looks]


def row(
    condition: Mapping[str, object], ends: Mapping[str, list[End]], change_frac: float
) -> tuple[dict[str, str], bool]:
    """Blocks, verdicts and false verdicts by rule; and whether any rule errs too often."""
    texts, is_wrong = {name: str(value) for name, value in condition.items()}, False
    for name, of_rule in ends.items():
        false = Share(sum(end.is_false(change_frac) for end in of_rule), len(of_rule))
        decided = 100 * fmean(not end.is_open for end in of_rule)
        texts[f"{name}: blocks"] = f"{fmean(end.num_blocks for end in of_rule):.1f}"
        texts[f"{name}: verdict"] = f"{decided:.1f}"
        texts[f"{name}: false"] = str(false)
        is_wrong |= not SELDOM.is_met(false)
    return texts | {"": "FAIL" if is_wrong else "ok"}, is_wrong


Rows = Iterator[tuple[dict[str, str], bool]]


def one_metric(n: int) -> Rows:
    """Looks after 6, 12, 18 and 24 blocks: an equal share for each look, and the levels of the table."""
    looks = look_blocks(24, NUM_LOOKS)
    for scatter, noise, change in product((0.01,), ALL, TRUTHS):
        yield _rules_row({"noise": noise, "scatter": f"{scatter:.1%}"}, noise, scatter, change, looks, n)


def scatters(n: int) -> Rows:
    """Normal noise of three sizes, and other numbers of looks and blocks."""
    for (most, num), scatter, change in product(((12, 4), (24, 4), (48, 8)), (0.005, 0.01, 0.02), TRUTHS):
        looks = look_blocks(most, num)
        condition = {"most": most, "looks": len(looks), "scatter": f"{scatter:.1%}"}
        yield _rules_row(condition, "gaussian", scatter, change, looks, n)


def _rules_row(
    condition: Mapping[str, object], noise: str, scatter: float, change: float, looks: Sequence[int], n: int
) -> tuple[dict[str, str], bool]:
    made = Made(noise=noise, num_blocks=looks[-1], ratio_sd=scatter, change_frac=change, margin_frac=MARGIN)
    stream = named_stream("looks truth", made)
    ends: dict[str, list[End]] = {"equal shares": [], "levels": [], "with futility": []}
    for i in range(n):
        experiment = make(made, stream)
        seen = looked_at(experiment, looks)
        if i < 3:
            check_shortcut(experiment, made, seen, levels_of(looks)[0])
        ends["equal shares"].append(until_verdict(seen, [ALPHA / len(looks)] * len(looks)))
        ends["levels"].append(until_verdict(seen, levels_of(looks)))
        ends["with futility"].append(until_hopeless(seen, levels_of(looks)))
    return row({**condition, "truth": f"{change:+.0%}"}, ends, change)


def several_tests(n: int) -> Rows:
    """Three metrics of two or of four arms, judged together at each look; any false verdict counts."""
    looks = look_blocks(24, NUM_LOOKS)
    for noise, arms, alike, change in product(
        ("gaussian", "outliers, 10 % by 30 %"), (2, 4), (False, True), (0.0, 0.01, 0.02)
    ):
        made = Made(
            noise=noise, num_blocks=24, ratio_sd=0.01, change_frac=change, margin_frac=MARGIN, num_arms=arms,
            num_metrics=3, are_metrics_alike=alike,
        )  # fmt: skip
        stream, ends = named_stream("several", made), list[End]()
        for _ in range(n):
            experiment = make(made, stream)
            for num, level in zip(looks, levels_of(looks), strict=True):
                compared = judge(first_blocks(experiment, num), replace(made, num_blocks=num), 1 - level)
                end = End(num, tuple(m.verdict for m in compared))
                if not end.is_open:
                    break
            ends.append(end)
        condition = {"noise": noise, "arms": arms, "metrics": "alike" if alike else "independent"}
        yield row({**condition, "truth": f"{change:+.0%}"}, {"levels": ends}, change)


def extended(n: int) -> Rows:
    """Eight blocks, and half as many again, up to three times, as long as there is no verdict."""
    looks = (8, 12, 18, 27)
    for noise, scatter, change in product(("gaussian", "outliers, 10 % by 30 %"), (0.01, 0.02), TRUTHS):
        made = Made(noise=noise, num_blocks=looks[-1], ratio_sd=scatter, change_frac=change, margin_frac=MARGIN)
        stream = named_stream("extended", made)
        ends = [
            until_verdict(looked_at(make(made, stream), looks), [ALPHA / (k + 1) for k in range(len(looks))])
            for _ in range(n)
        ]
        condition = {"noise": noise, "scatter": f"{scatter:.1%}", "truth": f"{change:+.0%}"}
        yield row(condition, {"added blocks": ends}, change)


SECTIONS: Final[Mapping[str, Callable[[int], Rows]]] = {
    "one-metric": one_metric,
    "scatters": scatters,
    "several-tests": several_tests,
    "extended": extended,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=300, metavar="N", help="for each row")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    asked, is_wrong = parser.parse_args(), False
    for name in asked.sections:
        rows = []
        for texts, wrong in SECTIONS[name](asked.experiments):
            rows.append((texts, wrong))
            print("; ".join(texts.values()), file=sys.stderr, flush=True)
        is_wrong |= any(wrong for _, wrong in rows)
        show(
            [texts for texts, _ in rows], f"{name}: {SECTIONS[name].__doc__} {asked.experiments} experiments a row"
        )
        sys.stdout.flush()
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
