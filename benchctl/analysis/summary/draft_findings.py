"""Findings on drafts themselves: those that were never made, and those that cannot save time."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from benchctl.analysis.summary.arm_drafts import ArmDrafts, arm_drafts
from benchctl.analysis.summary.finding import Finding
from benchctl.analysis.summary.runs import CellSummary, RunSummary
from benchctl.formats import count_of
from benchctl.records.directory import arm_order

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
