"""Findings: conclusions in words that the numbers support and that no table says."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Final

import numpy as np

from benchctl.analysis.compare.noise_words import NOISY_SCATTER_FRAC
from benchctl.analysis.experiment.pairing import deciding_among
from benchctl.analysis.experiment.summary import CellSummary, RunSummary, SweepRow
from benchctl.analysis.metrics.run import arm_drafts
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.profile.settings import load_part, server_part
from benchctl.records.directory import arm_label, arm_order
from benchctl.records.schema import Cell
from benchctl.units import count_of, range_of, s_from_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A sentence that the data support. ``code`` is stable; ``numbers`` are those of the sentence."""

    code: str
    sentence: str
    numbers: Mapping[str, float]


FLAT_MARGIN_FRAC: Final = 0.10
"""Flat: over the whole range of the factor, the interval of the change stays within ten percent."""
_MORE_FLOPS_FRAC: Final = 0.01
"""Fewer more FLOPs are the same: the slowdown has another cause, and nothing is to be explained by them."""
NOISIER_FACTOR: Final = 2.0
"""The baseline is noisy if its scatter is that of a noisy machine and twice that of the others."""
MIN_BLOCKS_FOR_SCATTER: Final = 3
_ONE_TOKEN: Final = 1 + 1e-9


def collect_findings(
    runs: Sequence[RunSummary], cells: Sequence[CellSummary], rows: Sequence[SweepRow], baseline: str
) -> tuple[Finding, ...]:
    """All findings, in a fixed order. ``runs`` includes suspect ones, which ``cells`` may leave out."""
    greedy = {cell.label: finding for cell in cells if (finding := _greedy_path(cell)) is not None}
    active = [row for row in rows if row.label not in greedy]
    of_loads = _groups(active, load_part)
    ordered = sorted(runs, key=lambda run: arm_order(run.record.variant, run.record.cell))
    findings = (
        *greedy.values(),
        *(_factor_effect(*group) for group in of_loads.items()),
        *(_unexplained(group, cells) for group in of_loads.values()),
        *(_of_curve(*group) for group in _groups(rows, server_part).items() if len(group[1]) > 1),
        _baseline_noise(cells, baseline, greedy),
        *_lazy_loads([run for cell in cells for run in cell.runs]),
        *(_drafts_in_vain(list(group), cells) for _, group in groupby(ordered, key=lambda run: run.label)),
    )
    return tuple(finding for finding in findings if finding is not None)


def _groups(rows: Iterable[SweepRow], part: Callable[[Cell], Cell]) -> dict[str, list[SweepRow]]:
    """Rows that share their variant and this part of their cell, by its name."""
    groups: dict[str, list[SweepRow]] = {}
    for row in rows:
        groups.setdefault(arm_label(row.variant, part(row.cell)), []).append(row)
    return groups


def _greedy_path(cell: CellSummary) -> Finding | None:
    """Guidance was requested, all steps of all runs were greedy, and no value model scored anything.

    Steps that do not record whether they are greedy are so if their requests leave one candidate.
    """
    reason = "were greedy"
    for run in cell.runs:
        share = run.number("greedy_step_frac")
        if run.settings is None or run.settings.guidance is None or run.number("guided_step_frac") != 0:
            return None
        if share is None and run.settings.sampling.is_greedy:
            reason = "left one candidate"
        elif share != 1:
            return None
    if not cell.runs:
        return None
    steps = sum(run.number("num_steps") or 0.0 for run in cell.runs)
    charged, total = cell.centre("lvm_pflops_total"), cell.centre("theoretical_pflops_total")
    sentence = (
        f"{cell.label} took the greedy path: all {steps:.0f} steps of its {count_of(len(cell.runs), 'run')} "
        f"{reason} and the value model never ran, so this cell measures no guidance."
    )
    numbers = {"num_steps": steps, "num_runs": float(len(cell.runs))}
    if charged and total:
        sentence += (
            f" The published FLOPs rule still charges it {charged:.3g} PFLOPs of value model, "
            f"{charged / total:.0%} of its total, which never happened."
        )
        numbers |= {"charged_pflops": charged, "charged_frac": charged / total}
    return Finding(code="greedy-path", sentence=sentence, numbers=numbers)


def _factor_effect(arm: str, rows: Sequence[SweepRow]) -> Finding | None:
    """Dependence of a variant's overhead, under one load, on the one factor that its cells differ in.

    Per block the slope of ln(wall ratio) over the factor by least squares; the baseline of the block shifts all
    its points equally, so its noise does not affect the slope. Then a Student-t interval over blocks.
    """
    factor = _numeric_factor(rows)
    walls = [row.ratios["wall"] for row in rows if "wall" in row.ratios]
    if factor is None or len(walls) < len(rows):
        return None
    logs = [dict(zip(wall.design.blocks, wall.adjusted_log_ratios, strict=True)) for wall in walls]
    values = [float(row.cell[factor]) for row in rows]  # type: ignore[arg-type]  # _numeric_factor says so
    blocks = sorted(set.intersection(*map(set, logs)))
    slopes = [float(np.polyfit(values, [of_row[block] for of_row in logs], 1)[0]) for block in blocks]
    slope = estimate_paired(slopes, estimator="mean") if slopes else None
    if slope is None or slope.log_interval is None:
        return None
    low, high = slope.log_interval
    first, last = min(values), max(values)
    limit = math.log1p(FLAT_MARGIN_FRAC) / (last - first)
    is_flat = -limit <= low and high <= limit
    if not is_flat and low <= 0 <= high:
        return None
    of_range = [math.expm1(log_ratio * (last - first)) for log_ratio in (slope.log_ratio, low, high)]
    trend = "is flat in" if is_flat else "grows with" if low > 0 else "shrinks with"
    sentence = (
        f"The overhead of {arm} {trend} {factor} from {first:g} to {last:g}: the wall ratio changes by "
        f"{of_range[0]:+.1%} [{of_range[1]:+.1%}, {of_range[2]:+.1%}] over the range"
    )
    sentence += f" (flat is within ±{FLAT_MARGIN_FRAC:.0%})" if is_flat else ""
    numbers = {"slope_log_per_unit": slope.log_ratio, "slope_log_ci_low": low, "slope_log_ci_high": high}
    flops_first, flops_last = (rows[values.index(end)].number("flops_ratio") for end in (first, last))
    if flops_first and flops_last:
        growth = flops_last / flops_first - 1
        sentence += f", the FLOPs of the published rule by {growth:+.0%} over the range"
        numbers["published_flops_growth_frac"] = growth
    return Finding(code="flat" if is_flat else "not-flat", sentence=sentence + ".", numbers=numbers)


def _of_curve(arm: str, rows: Sequence[SweepRow]) -> Finding | None:
    """The loads of a server under which the first deciding metric differs from the baseline, by intervals that all
    hold together.
    """
    pairs = [row.pair for row in rows]
    name = next(iter(deciding_among(pairs[0].sides[0], pairs)), "")
    level = 1 - (1 - pairs[0].confidence) / len(pairs)
    differing, changes, numbers = list[str](), list[str](), dict[str, float]()
    for pair in pairs:
        load, ratio = "/".join(map(str, load_part(pair.b.cell).values())), pair.ratio(name)
        interval = None if ratio is None else ratio.estimate.interval_at(level)
        if ratio is None or interval is None:
            continue
        value, low, high = (f"{math.expm1(end):+.1%}" for end in (ratio.estimate.log_ratio, *interval))
        changes.append(f"{value} [{low}, {high}] at {load}")
        numbers[f"ratio_at_{load}"] = ratio.estimate.ratio
        if not interval[0] <= 0 <= interval[1]:
            differing.append(load)
    if not differing:
        return None
    sentence = (
        f"The change of {name} from {pairs[0].a.variant} to {arm} sits at {'/'.join(load_part(rows[0].cell))}="
        f"{', '.join(differing)}: {', '.join(changes)}."
    )
    return Finding(code="place-on-curve", sentence=sentence, numbers=numbers)


def _numeric_factor(rows: Sequence[SweepRow]) -> str | None:
    """The only varied factor, if it takes at least three values, all numbers.

    No line fits numbers of draft tokens, whose gains level off while their costs grow.
    """
    if len({tuple(row.cell) for row in rows}) != 1 or len(rows) < 3:
        return None
    varied = [factor for factor in rows[0].cell if len({row.cell[factor] for row in rows}) > 1]
    is_line = len(varied) == 1 and varied[0] != "num_speculative_tokens"
    return varied[0] if is_line and all(type(row.cell[varied[0]]) in {int, float} for row in rows) else None


def _unexplained(rows: Sequence[SweepRow], cells: Sequence[CellSummary]) -> Finding | None:
    """The part of a slowdown that more FLOPs do not explain, by observed FLOPs if known.

    Nothing is said of cells whose observed FLOPs do not charge all that drafts cost, and the published rule charges
    none.
    """
    drafting = {  # by cell, and whether the passes of its drafts are charged
        cell.label: all(run.flops and run.flops.observed and run.flops.charges_drafts for run in cell.runs)
        for cell in cells
        if cell.speculates
    }
    slow = [
        row
        for row in rows
        # A slowdown is analyzed if its whole interval is above five percent
        if (row.number("wall_ratio_ci_low") or 0) > 1.05 and drafting.get(row.label, True)
    ]
    kind, suffix = "observed", "_observed"
    if any(row.number("unexplained_frac_observed") is None for row in slow):
        kind, suffix = "published", ""
        slow = [row for row in slow if row.label not in drafting]
    slow = [row for row in slow if (row.number(f"flops_ratio{suffix}") or math.inf) > 1 + _MORE_FLOPS_FRAC]
    shares = [share for row in slow if (share := row.number(f"unexplained_frac{suffix}")) is not None]
    if not slow or len(shares) != len(slow) or min(shares) <= 0:
        return None
    walls = [row.number("wall_ratio") or math.nan for row in slow]
    flops = [row.number(f"flops_ratio{suffix}") or math.nan for row in slow]
    percents = range_of([100 * share for share in shares], ".0f")
    return Finding(
        code="unexplained-by-flops",
        sentence=(
            f"{cells_in_words(slow)}: {range_of(walls, '.2f')} times the wall time for {range_of(flops, '.2f')} "
            f"times the {kind} FLOPs, so {percents}% of the slowdown (in logarithms) is not arithmetic."
        ),
        numbers={
            "wall_ratio": fmean(walls),
            f"flops_ratio{suffix}": fmean(flops),
            "unexplained_frac": fmean(shares),
        },
    )


def _baseline_noise(cells: Sequence[CellSummary], baseline: str, greedy: Collection[str]) -> Finding | None:
    base = next((cell.spreads.get("wall_s") for cell in cells if cell.variant == baseline), None)
    others = [
        spread
        for cell in cells
        if cell.variant != baseline and cell.label not in greedy
        if (spread := cell.spreads.get("wall_s")) is not None and spread.n >= MIN_BLOCKS_FOR_SCATTER
    ]
    if base is None or base.scatter_frac is None or base.n < MIN_BLOCKS_FOR_SCATTER or not others:
        return None
    pooled = math.sqrt(fmean((spread.scatter_frac or 0.0) ** 2 for spread in others))
    if base.scatter_frac < max(NOISY_SCATTER_FRAC, NOISIER_FACTOR * pooled):
        return None
    return Finding(
        code="noisy-baseline",
        sentence=(
            f"Wall times of the baseline scatter by {base.scatter_frac:.1%} over {base.n} blocks, those of the "
            f"other cells by {pooled:.1%}: a ratio to any single baseline run includes that scatter and misleads. "
            "Use ratios over all blocks with their interval, or absolute times."
        ),
        numbers={
            "baseline_scatter_frac": base.scatter_frac,
            "others_scatter_frac": pooled,
            "num_blocks": float(base.n),
        },
    )


def _lazy_loads(runs: Sequence[RunSummary]) -> Iterator[Finding]:
    """A value model that was loaded by its first request: in the warm-up, or in the measured load."""
    for code, phase, of_runs, consequence in (
        (
            "lazy-load-in-warmup",
            "the warm-up",
            [run.run.warmup_columns for run in runs],
            "without a warm-up the measured load would have paid for it",
        ),
        (
            "lazy-load-measured",
            "the measured load",
            [run.run.columns for run in runs],
            "the measured times include it; warm up with a guided request",
        ),
    ):
        times_ns = [sum(map(int, columns.section_ns.get("value_model_load", ()))) for columns in of_runs]
        if num_runs := sum(map(bool, times_ns)):
            load_s = s_from_ns(sum(times_ns) / num_runs)
            yield Finding(
                code=code,
                sentence=(
                    f"In {count_of(num_runs, 'run')} the value model was loaded during {phase} ({load_s:.2g} s): "
                    f"{consequence}."
                ),
                numbers={"num_runs": float(num_runs), "load_s": load_s},
            )


def cells_in_words(rows: Sequence[SweepRow]) -> str:
    """Rows of one variant: ``guided top_k=2, 3, 4``, or every cell in full if several factors vary."""
    factors = {tuple(row.cell) for row in rows}
    if len(rows) > 1 and len(factors) == 1 and len(rows[0].cell) == 1:
        (factor,) = rows[0].cell
        return f"{rows[0].variant} {factor}={', '.join(str(row.cell[factor]) for row in rows)}"
    return "; ".join(row.label for row in rows)


def _drafts_in_vain(runs: Sequence[RunSummary], cells: Sequence[CellSummary]) -> Finding | None:
    """An arm whose sequences gain one token in each step, as without drafts: its options ask for drafts that its
    finished runs never verified, or it pays for drafts that give nothing.
    """
    label, drafts = runs[0].label, arm_drafts([run.run for run in runs])
    if drafts is not None:
        cell = next((cell for cell in cells if cell.label == label), None)
        tokens = None if cell is None else cell.centre("tokens_per_step")
        if cell is None or tokens is None or tokens > _ONE_TOKEN:
            return None
        server = next((run.settings.server for run in cell.runs if run.settings is not None), None)
        options = (getattr(server, "num_speculative_tokens", None), getattr(server, "bonus_token", None))
        rates = {name: drafts.counts.metrics[name] for name in ("acceptance_rate", "acceptance_length")}
        reason = ": of one draft token and no bonus token one token comes, the accepted one or its replacement"
        return Finding(
            code="speculation-cannot-win",
            sentence=(
                f"{label} cannot win by its drafts: the tokens per step of a sequence are {tokens:.3g}, no more "
                f"than without them, and every draft costs time{reason if options == (1, False) else ''}."
            ),
            numbers={"tokens_per_step": tokens} | {k: rate for k, rate in rates.items() if rate is not None},
        )
    finished = [run for run in runs if len(run.run.columns)]
    is_asked = all(run.settings is not None and run.settings.server.speculates for run in finished)
    # steps that do not count drafts tell by their tokens: more than one of a sequence comes of drafts alone
    if not finished or not is_asked or any((run.number("tokens_per_step") or 0.0) > _ONE_TOKEN for run in finished):
        return None
    steps = sum(run.number("num_steps") or 0 for run in finished)
    return Finding(
        code="speculation-never-drafted",
        sentence=(
            f"{label} never drafted a token in {steps:.0f} steps of its {count_of(len(finished), 'run')}, although "
            "its server is configured to: it measures the path without speculative decoding."
        ),
        numbers={"num_steps": steps, "num_runs": float(len(finished))},
    )
