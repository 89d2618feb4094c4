"""Arms of an experiment: one variant in one cell, with the usable run of each block."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from benchctl.analysis.validity.usability import Usability
from benchctl.records.directory import arm_label, arm_order, cell_name
from benchctl.records.loaded import LoadedResults, LoadedRun
from benchctl.records.record import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One variant in one cell, by block."""

    variant: str
    cell: Cell
    runs: dict[int, LoadedRun]
    """Usable runs."""
    positions: dict[int, int]
    """Planned positions of the usable runs."""
    excluded: dict[int, str]
    """Reasons why the other runs are not usable."""
    client_excluded: dict[int, str]
    """Of usable runs: reasons why nothing counts that the client timed."""

    def restrict_to(self, blocks: Collection[int]) -> "Arm":
        """The arm with the usable runs of ``blocks`` only."""
        return replace(self, runs={block: run for block, run in self.runs.items() if block in blocks})

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the arm, in this and other experiments."""
        return self.variant, cell_key(self.cell)

    @property
    def label(self) -> str:
        return arm_label(self.variant, self.cell)


def cell_key(cell: Cell) -> str:
    """Name of a cell, whatever the order of its factors."""
    return cell_name(dict(sorted(cell.items())))


def group_by_arm(results: LoadedResults, usability_of: Callable[[LoadedRun], Usability]) -> tuple[Arm, ...]:
    """Every arm of the plan: the baseline first, then by variant and factor values."""
    begun = {run.record.run_id: run for run in results.runs}
    arms: dict[tuple[str, str], Arm] = {}
    for planned in results.plan.runs:
        fresh = Arm(
            variant=planned.variant, cell=planned.cell, runs={}, positions={}, excluded={}, client_excluded={}
        )
        arm = arms.setdefault(fresh.key, fresh)
        run = begun.get(planned.run_id)
        if run is None:
            arm.excluded[planned.block] = f"{planned.run_id}: not begun"
            continue
        usability = usability_of(run)
        if usability.excluded is not None:
            arm.excluded[planned.block] = f"{planned.run_id}: {usability.excluded}"
            continue
        arm.runs[planned.block] = run
        arm.positions[planned.block] = planned.position
        if usability.client_excluded is not None:
            label = "" if usability.label is None else f" ({usability.label})"
            arm.client_excluded[planned.block] = f"{planned.run_id}: {usability.client_excluded}{label}"
    baseline = results.manifest.baseline
    return tuple(sorted(arms.values(), key=lambda arm: arm_order(arm.variant, arm.cell, baseline)))
