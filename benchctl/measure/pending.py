"""The rest of an experiment: the runs that are not done, and those that are measured again.

A block is measured on one node and its same devices, to be compared.
"""

import os
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby

from benchctl.analysis.validity.machines import chooses_devices, scattered_blocks
from benchctl.engines.engine import engine_for
from benchctl.measure.directory import done_runs
from benchctl.measure.machine import node_name
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.measure.telemetry.reading import VARIABLE
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import Plan, PlannedRun, RunRecord
from benchctl.records.schema import GpuInfo


class Here:
    """This node, with the devices that servers of a profile can see; they are asked when it matters."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._engine = engine_for(profile.engine.kind)
        self._has_devices = self._engine.is_launched and self._engine.clock != "virtual"

    def has_measured(self, record: RunRecord) -> bool:
        """True where runs that are measured here can be compared with a run of their block.

        A simulator's numbers do not depend on the node.
        """
        if record.is_virtual:
            return True
        if record.node is None:
            return False
        uuids = frozenset(gpu.uuid for gpu in record.node.gpus)
        return record.node.name == node_name() and uuids == self._uuids_of(record)

    def are_together(self, records: Iterable[RunRecord]) -> bool:
        """True where runs of a block were measured on one node and its same devices."""
        return not scattered_blocks((record, self._settings_of(record)) for record in records)

    def _settings_of(self, record: RunRecord) -> VariantSettings:
        return variant_settings(self._profile, record.variant, record.cell)

    def _uuids_of(self, record: RunRecord) -> frozenset[str | None]:
        """The devices that a server of the same arm would see here."""
        settings = self._settings_of(record)
        if not (self._has_devices or chooses_devices(settings)):
            return frozenset()
        visible = getattr(settings.server, "env", {}).get(VARIABLE, os.environ.get(VARIABLE))
        return frozenset(gpu.uuid for gpu in _inventory(visible))


@cache
def _inventory(visible: str | None) -> tuple[GpuInfo, ...]:
    return gpu_inventory(visible)


def pending_runs(results: ResultDirectory, here: Here, plan: Plan | None = None) -> tuple[PlannedRun, ...]:
    """The runs of ``plan`` that are to be measured here, in its order: see ``pending_in_block``.

    By default it is that of ``results`` without blocks that a stopping rule made unnecessary.
    """
    runs = (plan or results.due_plan()).runs
    blocks = groupby(runs, key=lambda planned: planned.block)
    return tuple(planned for _, of_block in blocks for planned in pending_in_block(results, tuple(of_block), here))


def pending_in_block(results: ResultDirectory, runs: Sequence[PlannedRun], here: Here) -> tuple[PlannedRun, ...]:
    """The runs of one block that are to be measured here: those that are not done.

    They are all of them where some were done on another node or other devices, because runs of a block are
    compared.
    """
    done = dict(done_runs(results, runs))
    records = list(done.values())
    is_together = here.are_together(records)
    if len(done) == len(runs) and is_together:
        return ()
    if not is_together or not all(map(here.has_measured, records)):
        return tuple(runs)
    return tuple(planned for planned in runs if planned.run_id not in done)
