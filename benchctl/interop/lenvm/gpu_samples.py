"""``gpu_samples.csv``: output of nvidia-smi once per second, for every device of the host, in local time."""

import csv
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final

from benchctl.records.schema import GpuSample
from benchctl.units import NS_PER_S

_FORMAT: Final = "%Y/%m/%d %H:%M:%S.%f"
_MIB: Final = 1 << 20
_MOST_S: Final = 1e8
"""Above the duration of a run, and its time zone: three years."""
_MOST_NUMBER: Final = 1e9
"""Above every share in percent and every memory in MiB."""
_ZONE_S: Final = 900
"""Time zones differ by multiples of a quarter of an hour."""


def read_gpu_samples(lines: Iterable[str], *, start_epoch_s: float | None, start_ns: int) -> Iterator[GpuSample]:
    """The samples of a run that began at ``start_epoch_s``, on a clock that was ``start_ns`` then.

    The time zone is the one that puts the first sample next to that moment; if it is unknown, the first sample is
    the moment. Other lines (the header, half a line) are skipped.
    """
    origin_s: float | None = None
    for line in lines:
        sample = _sample(line)
        if sample is None:
            continue
        local_s, index, utilization, memory_mib = sample
        if origin_s is None:
            begin_s = local_s if start_epoch_s is None else start_epoch_s
            origin_s = begin_s + round((local_s - begin_s) / _ZONE_S) * _ZONE_S
        if abs(local_s - origin_s) > _MOST_S:
            continue
        yield GpuSample(
            t_ns=start_ns + round((local_s - origin_s) * NS_PER_S),
            index=index,
            source="nvidia-smi",
            utilization_frac=None if utilization is None else utilization / 100,
            memory_used_bytes=None if memory_mib is None else round(memory_mib * _MIB),
        )


def _sample(line: str) -> tuple[float, int, float | None, float | None] | None:
    try:
        cells = next(csv.reader([line], skipinitialspace=True), [])
        if len(cells) != 4:
            return None
        moment = datetime.strptime(cells[0], _FORMAT).replace(tzinfo=UTC)
        return moment.timestamp(), int(_number(cells[1]) or 0), _number(cells[2]), _number(cells[3])
    except (ValueError, csv.Error):
        return None


def _number(text: str) -> float | None:
    """A number; None for ``[N/A]``, which a device does not report. Raises ValueError for an impossible one."""
    if text.startswith("["):
        return None
    if not 0 <= (number := float(text)) <= _MOST_NUMBER:
        raise ValueError(text)
    return number
