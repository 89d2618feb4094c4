"""Places of runs: all runs of a block are measured on one node and its same devices, because they are compared."""

import os
import platform

from benchctl.measure.node import job_name, node_name
from benchctl.measure.telemetry.gpu import gpu_inventory
from benchctl.records.claims.lease import Owner, boot_id
from benchctl.records.manifest import GpuInfo
from benchctl.records.run import RunRecord


def this_owner() -> Owner:
    """This process as the owner of blocks."""
    return Owner(node=node_name(), hostname=platform.node(), boot_id=boot_id(), pid=os.getpid(), job=job_name())


class Here:
    """The node of this process, with the devices that its servers can see."""

    def __init__(self, gpus: tuple[GpuInfo, ...] | None = None) -> None:
        self.gpus = gpu_inventory() if gpus is None else gpus
        self._uuids = frozenset(gpu.uuid for gpu in self.gpus if gpu.uuid is not None)

    def has_measured(self, record: RunRecord) -> bool:
        """True where a run belongs together with those that are measured here.

        A simulator's numbers do not depend on the place. Older records name their host alone.
        """
        if record.clock == "virtual":
            return True
        if record.node is None:
            return record.host == platform.node()
        uuids = frozenset(gpu.uuid for gpu in record.node.gpus if gpu.uuid is not None)
        return record.node.name == node_name() and uuids == self._uuids
