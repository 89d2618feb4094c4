"""Metrics of GPU and host samples that were taken between the first send and the last output."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from benchctl.analysis.metrics.unknown import known_values, mean_of_known, quotient, total
from benchctl.records.samples import GpuSample, HostSample
from benchctl.units import s_from_ns


def device_energy_j(samples: Sequence[GpuSample]) -> float | None:
    """Energy that one device used between its first and last sample.

    The growth of its counter where it has one; otherwise Σ (P_i + P_{i+1}) / 2 · (t_{i+1} - t_i) over the
    samples that read power.
    """
    counted = [sample.energy_j for sample in samples if sample.energy_j is not None]
    if len(counted) > 1:
        return counted[-1] - counted[0]
    read = [(sample.t_ns, sample.power_w) for sample in samples if sample.power_w is not None]
    if len(read) < 2:
        return None
    return sum((p1 + p2) / 2 * s_from_ns(t2 - t1) for (t1, p1), (t2, p2) in pairwise(read))


def gpu_metrics(
    samples: Sequence[GpuSample], span: tuple[int, int] | None, *, are_whole: bool = True
) -> dict[str, float | None]:
    """``gpu_*`` metrics except the energy per token; one that any device does not report is unknown.

    Without ``are_whole``, a device has no samples for all of the load, and all metrics are unknown: sums would lack
    what it used.
    """
    devices: dict[int, list[GpuSample]] = defaultdict(list)
    for sample in samples if are_whole else ():
        if span is not None and span[0] <= sample.t_ns <= span[1]:
            devices[sample.index].append(sample)
    groups = [devices[index] for index in sorted(devices)]
    power = [mean_of_known([s.power_w for s in group]) for group in groups]
    busy = [mean_of_known([s.utilization_frac for s in group]) for group in groups]
    memory = [max(map(float, known_values(s.memory_used_bytes for s in group)), default=None) for group in groups]
    return {
        "gpu_energy_j": total([device_energy_j(group) for group in groups]),
        "gpu_power_w": total(power),
        "gpu_utilization_frac": quotient(total(busy), len(groups)),
        "gpu_peak_memory_bytes": total(memory),
    }


def host_metrics(samples: Sequence[HostSample], span: tuple[int, int] | None) -> dict[str, float | None]:
    """Mean busy cores of the server."""
    inside = [s for s in samples if span is not None and span[0] <= s.t_ns <= span[1]]
    return {"server_cpu_cores": mean_of_known([s.server_cpu_cores for s in inside])}
