"""``gpu_samples.csv``: output of nvidia-smi once per second, for every device of the host, in local time."""

import csv
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final

from benchctl.records.samples import GpuSample
from benchctl.units import NS_PER_S

_FORMAT: Final = "%Y/%m/%d %H:%M:%S.%f"
_MIB: Final = 1 << 20
_ZONE_S: Final = 900
"""Time zones differ by multiples of a quarter of an hour."""


def read_gpu_samples(lines: Iterable[str], *, start_epoch_s: float | None, start_ns: int) -> Iterator[GpuSample]:
    """The samples of a run that began at ``start_epoch_s``, on a clock that was ``start_ns`` then.

    The time zone is the one that puts the first sample next to that moment; if it is unknown, the first sample is
    the moment. Other lines (the header, half a line) are skipped.
    """
    origin_s: float | None = None
    for cells in csv.reader(lines, skipinitialspace=True):
        sample = _sample(cells)
        if sample is None:
            continue
        local_s, index, utilization, memory_mib = sample
        if origin_s is None:
            begin_s = local_s if start_epoch_s is None else start_epoch_s
            origin_s = begin_s + round((local_s - begin_s) / _ZONE_S) * _ZONE_S
        yield GpuSample(
            t_ns=start_ns + round((local_s - origin_s) * NS_PER_S),
            index=index,
            source="nvidia-smi",
            utilization_frac=None if utilization is None else utilization / 100,
            memory_used_bytes=None if memory_mib is None else round(memory_mib * _MIB),
        )


def _sample(cells: list[str]) -> tuple[float, int, float | None, float | None] | None:
    if len(cells) != 4:
        return None
    try:
        moment = datetime.strptime(cells[0], _FORMAT).replace(tzinfo=UTC)
        return moment.timestamp(), int(cells[1]), _number(cells[2]), _number(cells[3])
    except ValueError:
        return None


def _number(text: str) -> float | None:
    """A number; None for ``[N/A]``, which a device does not report."""
    return None if text.startswith("[") else float(text)
