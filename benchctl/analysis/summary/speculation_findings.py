"""Findings on speculative decoding: the cells that it makes slower than none, and those that it makes faster.

A cell is judged where its server speculates, that of the baseline does not, and the whole interval of the ratio of
wall times is on one side of 1. For equal work that ratio is the time of a step over the tokens that it yields.
"""

from collections.abc import Sequence

from benchctl.analysis.summary.finding import Finding
from benchctl.analysis.summary.findings import cells_in_words
from benchctl.analysis.summary.runs import CellSummary
from benchctl.analysis.summary.sweep import SweepRow


def speculation_findings(
    cells: Sequence[CellSummary], rows: Sequence[SweepRow], baseline: str
) -> tuple[Finding, ...]:
    """At most one finding of each kind for each variant."""
    if any(cell.speculates is not False for cell in cells if cell.variant == baseline):
        return ()
    speculating = {cell.label: cell for cell in cells if cell.speculates}
    own = [row for row in rows if row.label in speculating and row.number("wall_ratio") is not None]
    findings: list[Finding] = []
    for variant in dict.fromkeys(row.variant for row in own):
        slower = [row for row in own if row.variant == variant and (row.number("wall_ratio_ci_low") or 0.0) > 1]
        faster = [row for row in own if row.variant == variant and (row.number("wall_ratio_ci_high") or 2.0) < 1]
        if slower:
            sentence, numbers = _conclusion("slower", slower, max(slower, key=_wall_ratio), speculating)
            findings.append(Finding(code="speculation-slower", sentence=sentence, numbers=numbers))
        if faster:
            sentence, numbers = _conclusion("faster", faster, min(faster, key=_wall_ratio), speculating)
            findings.append(Finding(code="speculation-faster", sentence=sentence, numbers=numbers))
    return tuple(findings)


def _wall_ratio(row: SweepRow) -> float:
    return row.number("wall_ratio") or 1.0


def _conclusion(
    verdict: str, rows: Sequence[SweepRow], most: SweepRow, speculating: dict[str, CellSummary]
) -> tuple[str, dict[str, float]]:
    """The sentence, and the numbers of the cell that deviates the most."""
    ratio, low, high = (most.number(f"wall_ratio{end}") for end in ("", "_ci_low", "_ci_high"))
    tokens, step_ratio = speculating[most.label].centre("tokens_per_step"), most.number("step_ms_ratio")
    numbers = {"wall_ratio": ratio, "wall_ratio_ci_low": low, "wall_ratio_ci_high": high}
    subject = f", the most at {most.label}" if len(rows) > 1 else ""
    sentence = (
        f"{cells_in_words(rows)}: speculation is {verdict} than none{subject}: {ratio:.3g} [{low:.3g}, {high:.3g}] "
        "times the wall time"
    )
    if tokens is not None and step_ratio is not None:
        sentence += f", as a step takes {step_ratio:.3g} times as long and yields {tokens:.2f} tokens of a row"
        numbers |= {"step_ms_ratio": step_ratio, "tokens_per_step": tokens}
    return f"{sentence}.", {name: value for name, value in numbers.items() if value is not None}
