"""``neighbours.json``: whether blocks that run at the same time on one host disturb each other, as measured.

A check is an A/A experiment whose runs alternate between *alone* and *beside* neighbours. Experiments that run
several blocks at a time get a copy of the newest one on file, so that a reader needs nothing but their directory.
"""

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from benchctl.records.documents import record_of
from benchctl.records.files import read_document
from benchctl.records.jsonl import write_json_atomic
from benchctl.records.machine_measurement import MachineMeasurement
from benchctl.records.record import Amount, Count, Record
from benchctl.untrusted.files import is_there

NEIGHBOURS_FILE: Final = "neighbours.json"
CHECK_NOTE: Final = "neighbour-check"
"""Code of the note in the manifest of the experiment that a check is."""
_REMEDY: Final = "remove the file, or check again with 'benchctl noise neighbours'"


class NeighbourSlot(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One place for one block at a time."""

    index: Count
    """Number of the slot, from 0; the check measures on slot 0, and the others are its neighbours."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its devices; empty on a host without any."""
    cores: tuple[Count, ...] = ()
    """Its processor cores; empty for all."""


class NeighbourEffect(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A quantity of a server beside neighbours, relative to the same server alone."""

    ratio: Amount
    """Beside over alone."""
    ci_low: Amount | None = None
    """Lower end of the interval at the confidence of the check."""
    ci_high: Amount | None = None
    """Upper end of that interval."""
    num_blocks: Count
    """Blocks that count."""
    margin_frac: Amount
    """Change, as a fraction, beyond which a disturbance is claimed: 1 %, or the noise floor if that is larger."""
    finding: Literal["disturbed", "undisturbed", "undecided"]
    """Finding of the check for this quantity."""
    blocks_needed: Count | None = None
    """Blocks in all that would decide; None where it is decided, or where no number of blocks helps."""


class NeighbourReading(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A reading of the device or the host that may explain a disturbance."""

    alone: Amount
    """Mean over the runs alone."""
    beside: Amount
    """Mean over the runs beside neighbours."""
    is_beyond_chance: bool
    """Whether the interval of their ratio excludes 1, at the confidence of the check."""


class NeighbourCheck(MachineMeasurement, frozen=True, kw_only=True, omit_defaults=True):
    """The mutual disturbance of blocks that run at the same time, for one host, engine, model and set of slots."""

    slots: Annotated[tuple[NeighbourSlot, ...], msgspec.Meta(min_length=2)]
    """Slots, of which the first was measured and the others were its neighbours."""
    confidence: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    """Of each interval, so that all claims together are wrong in at most 1 % of checks without a disturbance."""
    metrics: dict[str, NeighbourEffect] = {}
    """Effect on each deciding metric; empty until the check is done."""
    lost_alone: tuple[Count, Count] = (0, 0)
    """Runs alone that do not count, and all of them."""
    lost_beside: tuple[Count, Count] = (0, 0)
    """Runs beside neighbours that do not count, and all of them."""
    loses_runs: bool = False
    """Whether more runs do not count beside neighbours than alone, beyond chance."""
    readings: dict[str, NeighbourReading] = {}
    """Clocks and power of the devices, and processor time of the server, as far as they were read."""
    throttled: dict[str, tuple[Amount, Amount]] = {}
    """Share of readings in which a device gave this reason for a lowered clock: alone, and beside neighbours."""

    @property
    def parallel(self) -> int:
        """Blocks that run at the same time."""
        return len(self.slots)

    @property
    def is_done(self) -> bool:
        """True once it has a result."""
        return self.lost_beside[1] > 0


def load_neighbours(results_path: Path) -> NeighbourCheck | None:
    """The check in a result directory; None without one. Raises RecordError when it is damaged."""
    path = results_path / NEIGHBOURS_FILE
    return read_neighbours(path, within=results_path) if is_there(path, within=results_path) else None


def read_neighbours(path: Path, *, within: Path | None = None) -> NeighbourCheck:
    """Read one file of a check, to which no link leads from ``within``, by default its folder.

    Raises RecordError when it is damaged, SchemaVersionError when it is newer.
    """
    content = read_document(path, within=within or path.parent)
    return record_of(content, path, NeighbourCheck, remedy=_REMEDY)


def write_neighbours(path: Path, check: NeighbourCheck) -> None:
    write_json_atomic(path, check)
