"""Findings: conclusions in words that the numbers support and that no table says."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Final

import numpy as np

from benchctl.analysis.metrics.speculation import ArmDrafts, arm_drafts
from benchctl.analysis.statistics.estimate import estimate_paired
from benchctl.analysis.summary.summary import CellSummary, RunSummary, SweepRow
from benchctl.formats import count_of
from benchctl.records.columns.columns import exact_sum
from benchctl.records.directory import arm_order
from benchctl.units import s_from_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A sentence that the data support. ``code`` is stable; ``numbers`` are those of the sentence."""

    code: str
    sentence: str
    numbers: Mapping[str, float]


FLAT_MARGIN_FRAC: Final = 0.10
"""Flat: over the whole range of the factor, the interval of the change stays within ten percent."""
SLOWDOWN_FRAC: Final = 0.05
"""A slowdown is analyzed if its whole interval is above five percent."""
NOISY_SCATTER_FRAC: Final = 0.03
NOISIER_FACTOR: Final = 2.0
"""The baseline is noisy if its scatter is at least three percent and twice that of the others."""
MIN_BLOCKS_FOR_SCATTER: Final = 3
_LAZY_LOAD: Final = "value_model_load"


def collect_findings(cells: Sequence[CellSummary], rows: Sequence[SweepRow], baseline: str) -> tuple[Finding, ...]:
    """All findings of an experiment, in a fixed order."""
    greedy = [cell for cell in cells if _took_greedy_path(cell)]
    greedy_labels = {cell.label for cell in greedy}
    active = [row for row in rows if row.label not in greedy_labels]
    by_variant = [list(group) for _, group in itertools.groupby(active, key=lambda row: row.variant)]
    drafting = {cell.label for cell in cells if cell.speculates}
    uncharged = {cell.label for cell in cells if cell.label in drafting and not _charges_drafts(cell)}
    findings = [
        *(_greedy_path(cell) for cell in greedy),
        *(_factor_effect(group) for group in by_variant),
        *(_unexplained([row for row in group if row.label not in uncharged], drafting) for group in by_variant),
        _baseline_noise(cells, baseline, greedy_labels),
        *_lazy_loads([run for cell in cells for run in cell.runs]),
    ]
    return tuple(finding for finding in findings if finding is not None)


def _charges_drafts(cell: CellSummary) -> bool:
    """True if the observed FLOPs of all runs include all that drafts cost."""
    return all(
        run.flops is not None and run.flops.observed is not None and run.flops.charges_drafts for run in cell.runs
    )


def _took_greedy_path(cell: CellSummary) -> bool:
    """True if guidance was requested, all steps of all runs were greedy, and no value model scored anything."""
    return bool(cell.runs) and all(
        run.settings is not None
        and run.settings.guidance is not None
        and run.number("guided_step_frac") == 0
        and (run.number("greedy_step_frac") == 1 or _is_greedy_by_request(run))
        for run in cell.runs
    )


def _is_greedy_by_request(run: RunSummary) -> bool:
    """True if its steps do not record whether they are greedy, and its requests leave one candidate."""
    is_greedy = run.settings is not None and run.settings.sampling.is_greedy
    return is_greedy and run.number("greedy_step_frac") is None


def _greedy_path(cell: CellSummary) -> Finding:
    steps = sum(run.number("num_steps") or 0 for run in cell.runs)
    charged, total = cell.centre("lvm_pflops_total"), cell.centre("theoretical_pflops_total")
    reason = "left one candidate" if any(map(_is_greedy_by_request, cell.runs)) else "were greedy"
    num_runs = count_of(len(cell.runs), "run")
    sentence = (
        f"{cell.label} took the greedy path: all {steps:.0f} steps of its {num_runs} {reason} and the value model "
        "never ran, so this cell measures no guidance."
    )
    numbers = {"num_steps": float(steps), "num_runs": float(len(cell.runs))}
    if charged and total:
        sentence += (
            f" The published FLOPs rule still charges it {charged:.3g} PFLOPs of value model, "
            f"{charged / total:.0%} of its total, which never happened."
        )
        numbers |= {"charged_pflops": charged, "charged_frac": charged / total}
    return Finding(code="greedy-path", sentence=sentence, numbers=numbers)


def _factor_effect(rows: Sequence[SweepRow]) -> Finding | None:
    """Dependence of a variant's overhead on the one factor that its cells differ in.

    Per block the slope of ln(wall ratio) over the factor by least squares; the baseline of the block shifts all
    its points equally, so its noise does not affect the slope. Then a Student-t interval over blocks.
    """
    factor = _numeric_factor(rows)
    if factor is None or not all("wall" in row.ratios for row in rows):
        return None
    if factor == "num_speculative_tokens":  # no line: gains level off while costs grow
        return None
    blocks = set.intersection(*(set(row.ratios["wall"].design.blocks) for row in rows))
    if len(blocks) < 2:
        return None
    values = [float(row.cell[factor]) for row in rows]  # type: ignore[arg-type]  # _numeric_factor says so
    walls = [
        dict(zip(wall.design.blocks, wall.adjusted_log_ratios, strict=True))
        for wall in (row.ratios["wall"] for row in rows)
    ]
    slopes = [float(np.polyfit(values, [logs[block] for logs in walls], 1)[0]) for block in sorted(blocks)]
    slope = estimate_paired(slopes, estimator="mean")
    if slope.log_interval is None:
        return None
    low, high = slope.log_interval
    first, last = min(values), max(values)
    limit = math.log1p(FLAT_MARGIN_FRAC) / (last - first)
    is_flat = -limit <= low and high <= limit
    if not is_flat and low <= 0 <= high:
        return None
    of_range = [math.expm1(log_ratio * (last - first)) for log_ratio in (slope.log_ratio, low, high)]
    change = f"{of_range[0]:+.1%} [{of_range[1]:+.1%}, {of_range[2]:+.1%}]"
    subject = f"The overhead of {rows[0].variant}"
    claim = f"is flat in {factor}" if is_flat else f"{'grows' if low > 0 else 'shrinks'} with {factor}"
    sentence = f"{subject} {claim} from {first:g} to {last:g}: the wall ratio changes by {change} over the range"
    sentence += f" (flat is within ±{FLAT_MARGIN_FRAC:.0%})" if is_flat else ""
    ends = [rows[values.index(end)].number("flops_ratio") for end in (first, last)]
    numbers = {"slope_log_per_unit": slope.log_ratio, "slope_log_ci_low": low, "slope_log_ci_high": high}
    if ends[0] and ends[1]:
        sentence += f", the FLOPs of the published rule by {ends[1] / ends[0] - 1:+.0%} over the range"
        numbers["published_flops_growth_frac"] = ends[1] / ends[0] - 1
    return Finding(code="flat" if is_flat else "not-flat", sentence=sentence + ".", numbers=numbers)


def _numeric_factor(rows: Sequence[SweepRow]) -> str | None:
    """The only varied factor, if it takes at least three values, all numbers."""
    if len({tuple(row.cell) for row in rows}) != 1:
        return None
    varied = [factor for factor in rows[0].cell if len({row.cell[factor] for row in rows}) > 1]
    if len(varied) != 1 or len(rows) < 3:
        return None
    are_numbers = all(type(row.cell[varied[0]]) in {int, float} for row in rows)
    return varied[0] if are_numbers else None


def _unexplained(rows: Sequence[SweepRow], drafting: Collection[str]) -> Finding | None:
    """The part of a slowdown that more FLOPs do not explain, by observed FLOPs if known.

    The published rule charges no drafts, so it says nothing about the ``drafting`` arms.
    """
    slow = [row for row in rows if (row.number("wall_ratio_ci_low") or 0) > 1 + SLOWDOWN_FRAC]
    kind = "observed" if all(row.number("unexplained_frac_observed") is not None for row in slow) else "published"
    suffix = "_observed" if kind == "observed" else ""
    if kind == "published":
        slow = [row for row in slow if row.label not in drafting]
    shares = [share for row in slow if (share := row.number(f"unexplained_frac{suffix}")) is not None]
    if not slow or len(shares) != len(slow) or min(shares) <= 0:
        return None
    walls = [row.number("wall_ratio") or math.nan for row in slow]
    flops = [row.number(f"flops_ratio{suffix}") or math.nan for row in slow]
    percents = span_of([100 * share for share in shares], ".0f")
    sentence = (
        f"{cells_in_words(slow)}: {span_of(walls, '.2f')} times the wall time for {span_of(flops, '.2f')} times "
        f"the {kind} FLOPs, so {percents}% of the slowdown (in logarithms) is not arithmetic."
    )
    numbers = {"wall_ratio": fmean(walls), f"flops_ratio{suffix}": fmean(flops), "unexplained_frac": fmean(shares)}
    return Finding(code="unexplained-by-flops", sentence=sentence, numbers=numbers)


def _baseline_noise(cells: Sequence[CellSummary], baseline: str, greedy_labels: set[str]) -> Finding | None:
    base = next((cell.spreads.get("wall_s") for cell in cells if cell.variant == baseline), None)
    others = [
        spread
        for cell in cells
        if cell.variant != baseline and cell.label not in greedy_labels
        if (spread := cell.spreads.get("wall_s")) is not None and spread.n >= MIN_BLOCKS_FOR_SCATTER
    ]
    if base is None or base.scatter_frac is None or base.n < MIN_BLOCKS_FOR_SCATTER or not others:
        return None
    pooled = math.sqrt(fmean((spread.scatter_frac or 0.0) ** 2 for spread in others))
    if base.scatter_frac < max(NOISY_SCATTER_FRAC, NOISIER_FACTOR * pooled):
        return None
    sentence = (
        f"Wall times of the baseline scatter by {base.scatter_frac:.1%} over {base.n} blocks, those of the other "
        f"cells by {pooled:.1%}: a ratio to any single baseline run includes that scatter and misleads. Use ratios "
        "over all blocks with their interval, or absolute times."
    )
    numbers = {
        "baseline_scatter_frac": base.scatter_frac,
        "others_scatter_frac": pooled,
        "num_blocks": float(base.n),
    }
    return Finding(code="noisy-baseline", sentence=sentence, numbers=numbers)


def _lazy_loads(runs: Sequence[RunSummary]) -> list[Finding]:
    """A value model that was loaded by its first request: in the warm-up, or in the measured load."""
    findings = []
    for is_warmup, code, consequence in (
        (True, "lazy-load-in-warmup", "without a warm-up the measured load would have paid for it"),
        (False, "lazy-load-measured", "the measured times include it; warm up with a guided request"),
    ):
        loads = [load for run in runs if (load := _load_ns(run, is_warmup=is_warmup)) > 0]
        if loads:
            mean_s = s_from_ns(fmean(loads))
            phase = "the warm-up" if is_warmup else "the measured load"
            subject = f"In {count_of(len(loads), 'run')} the value model"
            sentence = f"{subject} was loaded during {phase} ({mean_s:.2g} s): {consequence}."
            numbers = {"num_runs": float(len(loads)), "load_s": mean_s}
            findings.append(Finding(code=code, sentence=sentence, numbers=numbers))
    return findings


def _load_ns(run: RunSummary, *, is_warmup: bool) -> int:
    if not is_warmup:
        return run.tally.total_ns.get(_LAZY_LOAD, 0)
    loads = run.run.warmup_columns.section_ns.get(_LAZY_LOAD)
    return 0 if loads is None else exact_sum(loads)


def cells_in_words(rows: Sequence[SweepRow]) -> str:
    """Rows of one variant: ``guided top_k=2, 3, 4``, or every cell in full if several factors vary."""
    factors = {tuple(row.cell) for row in rows}
    if len(rows) > 1 and len(factors) == 1 and len(rows[0].cell) == 1:
        (factor,) = rows[0].cell
        return f"{rows[0].variant} {factor}={', '.join(str(row.cell[factor]) for row in rows)}"
    return "; ".join(row.label for row in rows)


def span_of(values: Sequence[float], form: str) -> str:
    """One value, or the smallest and the largest if their texts differ."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


_ONE_TOKEN: Final = 1 + 1e-9


def draft_findings(runs: Sequence[RunSummary], cells: Sequence[CellSummary]) -> Iterator[Finding]:
    """Findings on the drafts of each arm. ``runs`` includes suspect ones, which ``cells`` may leave out."""
    by_label = {cell.label: cell for cell in cells}
    ordered = sorted(runs, key=lambda run: arm_order(run.record.variant, run.record.cell))
    for label, group in groupby(ordered, key=lambda run: run.label):
        of_arm = list(group)
        cell, drafts = by_label.get(label), arm_drafts([run.run for run in of_arm])
        if drafts is None:
            yield from _never_drafted(label, of_arm)
        elif cell is not None and (tokens := cell.centre("tokens_per_step")) is not None:
            yield from _cannot_win(cell, tokens, drafts)


def _never_drafted(label: str, runs: Sequence[RunSummary]) -> Iterator[Finding]:
    """An arm whose options ask for drafts and whose finished runs verified none.

    Steps that do not count drafts tell by their tokens: more than one of a sequence comes of drafts alone.
    """
    finished = [run for run in runs if len(run.run.columns)]
    if not finished or not all(run.settings is not None and run.settings.server.speculates for run in finished):
        return
    if any((run.number("tokens_per_step") or 0.0) > _ONE_TOKEN for run in finished):
        return
    steps = sum(run.number("num_steps") or 0 for run in finished)
    yield Finding(
        code="speculation-never-drafted",
        sentence=(
            f"{label} never drafted a token in {steps:.0f} steps of its {count_of(len(finished), 'run')}, although "
            "its server is configured to: it measures the path without speculative decoding."
        ),
        numbers={"num_steps": steps, "num_runs": float(len(finished))},
    )


def _cannot_win(cell: CellSummary, tokens_per_step: float, drafts: ArmDrafts) -> Iterator[Finding]:
    """A sequence that gains one token in each step, as without drafts, and pays for them."""
    if tokens_per_step > _ONE_TOKEN:
        return
    server = next((run.settings.server for run in cell.runs if run.settings is not None), None)
    options = (getattr(server, "num_speculative_tokens", None), getattr(server, "bonus_token", None))
    reason = ""
    if options == (1, False):
        reason = ": of one draft token and no bonus token one token comes, the accepted one or its replacement"
    yield Finding(
        code="speculation-cannot-win",
        sentence=(
            f"{cell.label} cannot win by its drafts: the tokens per step of a sequence are {tokens_per_step:.3g}, "
            f"no more than without them, and every draft costs time{reason}."
        ),
        numbers={"tokens_per_step": tokens_per_step, **_rates(drafts)},
    )


def _rates(drafts: ArmDrafts) -> Mapping[str, float]:
    rates = {"acceptance_rate": drafts.acceptance_rate, "acceptance_length": drafts.acceptance_length}
    return {name: rate for name, rate in rates.items() if rate is not None}
