"""Sites of runs: the machine and the devices on which each was measured.

Arms are compared within blocks because there they met the same machine. A block of which some runs were measured
elsewhere compares machines with one another, and is left out. The numbers of a simulator with its own clock do not
depend on it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from benchctl.formats import in_a_row
from benchctl.profile.model import VariantSettings
from benchctl.records.record import RunRecord
from benchctl.untrusted.text import visible_line

_CHOICE: Final = "CUDA_VISIBLE_DEVICES"
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A machine with the devices that a server could see."""

    node: str
    devices: frozenset[str] | None
    """Identities of the devices; None where the arm itself chooses them, and may have others than other arms."""

    def __str__(self) -> str:
        devices = f" with {', '.join(sorted(self.devices))}" if self.devices else ""
        return f"{self.node}{devices}"


def site_of(record: RunRecord, *, chooses_devices: bool = False) -> Site | None:
    """The site of a run; None where its numbers do not depend on one, or none is recorded."""
    if record.node is None or record.clock == "virtual":
        return None
    devices = frozenset(gpu.uuid or f"GPU {gpu.index}" for gpu in record.node.gpus)
    return Site(node=record.node.name, devices=None if chooses_devices else devices)


def chooses_devices(settings: VariantSettings | None) -> bool:
    """True where the profile itself gives devices to the servers of an arm."""
    return settings is not None and _CHOICE in getattr(settings.server, "env", {})


def scattered_blocks(sites: Iterable[tuple[RunRecord, Site | None]]) -> Mapping[int, str]:
    """The blocks whose runs were measured at several sites, with the sentence that says which were."""
    by_block: dict[int, list[tuple[RunRecord, Site]]] = {}
    for record, site in sites:
        if site is not None:
            by_block.setdefault(record.block, []).append((record, site))
    return {block: _sentence(placed) for block, placed in sorted(by_block.items()) if _is_scattered(placed)}


def _is_scattered(placed: list[tuple[RunRecord, Site]]) -> bool:
    nodes = {site.node for _, site in placed}
    devices = {site.devices for _, site in placed if site.devices is not None}
    return len(nodes) > 1 or len(devices) > 1


def _sentence(placed: list[tuple[RunRecord, Site]]) -> str:
    has_one_node = len({site.node for _, site in placed}) == 1
    runs_at: dict[str, list[str]] = {}
    for record, site in placed:
        runs_at.setdefault(str(site) if has_one_node else site.node, []).append(record.run_id)
    described = [f"{where} ({', '.join(run_ids)})" for where, run_ids in runs_at.items()]
    what = "devices" if has_one_node else "nodes"
    return visible_line(f"its runs were measured on several {what}: {in_a_row(described)}")


def have_same_cores(records: Iterable[RunRecord]) -> bool:
    """True where no two runs had other cores of a host; older runs of one host count as the same."""
    return len({None if record.node is None else record.node.cores for record in records}) <= 1


def num_cores(ranges: str) -> int:
    """The number of cores in a list such as ``0-7,16-23``."""
    return sum(int(last or first) - int(first) + 1 for first, last in _RANGE.findall(ranges))


def has_one_host(records: Iterable[RunRecord], hostname: str | None) -> bool:
    """True where no two runs were measured on different hosts.

    Those that record no node were measured on ``hostname``; None where they had several.
    """
    hosts = {hostname if record.node is None else record.node.hostname for record in records}
    return len(hosts) <= 1 and None not in hosts
