"""This node and the nodes of runs: a block is measured on one node and its same devices, to be compared."""

import os
import platform
from collections.abc import Sequence
from functools import cache

from benchctl.analysis.validity.machines import chooses_devices, scattered_blocks
from benchctl.engines.engine import engine_for
from benchctl.measure.machine import node_name
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.measure.telemetry.reading import VARIABLE
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.records.record import RunRecord
from benchctl.records.schema import GpuInfo


class Here:
    """This node, with the devices that servers of a profile can see; they are asked when it matters."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._engine = engine_for(profile.engine.kind)
        self._has_devices = self._engine.is_launched and self._engine.clock != "virtual"

    @property
    def gpu_names(self) -> list[str]:
        """Names of the devices that this process can see; none for a simulator, which uses none."""
        return [gpu.name for gpu in _inventory(os.environ.get(VARIABLE))] if self._has_devices else []

    def has_measured(self, record: RunRecord) -> bool:
        """True where runs that are measured here can be compared with a run of their block.

        A simulator's numbers do not depend on the node. Older records name their host alone.
        """
        if record.is_virtual:
            return True
        if record.node is None:
            return record.host == platform.node()
        return record.node.name == node_name() and _uuids(record) == self._uuids_of(record)

    def are_together(self, records: Sequence[RunRecord]) -> bool:
        """True where runs of a block were measured on one node and its same devices; older ones on one host."""
        timed = [record for record in records if record.clock != "virtual"]
        if any(record.node is None for record in timed):
            return len({record.host for record in timed}) <= 1
        return not scattered_blocks((record, self._settings_of(record)) for record in timed)

    def _settings_of(self, record: RunRecord) -> VariantSettings:
        return variant_settings(self._profile, record.variant, record.cell)

    def _uuids_of(self, record: RunRecord) -> frozenset[str | None]:
        """The devices that a server of the same arm would see here."""
        settings = self._settings_of(record)
        if not (self._has_devices or chooses_devices(settings)):
            return frozenset()
        visible = getattr(settings.server, "env", {}).get(VARIABLE, os.environ.get(VARIABLE))
        return frozenset(gpu.uuid for gpu in _inventory(visible))


def _uuids(record: RunRecord) -> frozenset[str | None]:
    return frozenset(() if record.node is None else (gpu.uuid for gpu in record.node.gpus))


@cache
def _inventory(visible: str | None) -> tuple[GpuInfo, ...]:
    return gpu_inventory(visible)
