"""Samples taken during a run: of the client, the devices, the host and the server's counters."""

from typing import Literal

from benchctl.records.record import Amount, Count, MomentNs, Record, Size


class ClockOffset(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The wall clock less the monotonic clock, from one moment on."""

    t_ns: MomentNs
    """The moment."""
    realtime_less_monotonic_ns: MomentNs
    """Nanoseconds since 1970, less those of the monotonic clock."""


class ClientSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Health of one process of the load generator since its last sample."""

    t_ns: MomentNs
    """Time of the sample."""
    worker: Count = 0
    """Number of the process."""
    loop_lag_ns: MomentNs
    """Delay of its event loop: it woke for this sample so much later than due."""
    cpu_ns: Size
    """Processor time of the process until now."""
    num_open: Count
    """Requests open at ``t_ns``."""
    offset: ClockOffset | None = None
    """The wall clock, if it is new: in the first sample, and after it was set."""


class GpuSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One reading of one visible device."""

    t_ns: MomentNs
    """Time of the sample."""
    index: Count
    """Number of the device."""
    uuid: str | None = None
    """Identity of the device."""
    source: Literal["nvml", "nvidia-smi"]
    """Program that read it."""
    utilization_frac: Amount | None = None
    """Share of time in which a kernel ran, 0 to 1."""
    memory_used_bytes: Size | None = None
    """Device memory in use, of all programs."""
    power_w: Amount | None = None
    """Power draw in watts."""
    energy_j: Amount | None = None
    """Counter of the device since its driver was loaded, in joules; differences are energy."""
    sm_clock_hz: Size | None = None
    """Clock of the processors."""
    memory_clock_hz: Size | None = None
    """Clock of the memory."""
    temperature_c: float | None = None
    """Temperature in degrees Celsius."""
    throttle_reasons: tuple[str, ...] | None = None
    """Reasons for which the device limits its clocks, in NVIDIA's names."""


class HostSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The server's process tree and the client, as psutil sees them."""

    t_ns: MomentNs
    """Time of the sample."""
    server_cpu_cores: Amount | None = None
    """Cores kept busy by the server since the previous sample (1.5 = one and a half cores)."""
    server_rss_bytes: Size | None = None
    """Resident memory of the server's processes."""
    server_processes: Count | None = None
    """Number of the server's processes."""
    client_cpu_cores: Amount | None = None
    """Cores kept busy by the client since the previous sample."""
    host_cpu_frac: Amount | None = None
    """Share of all cores that were busy, 0 to 1."""
    memory_available_bytes: Size | None = None
    """Memory that programs can still have without swapping."""


class PrometheusSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The server's counters and gauges at one moment, without histogram buckets."""

    t_ns: MomentNs
    """Time of the sample."""
    values: dict[str, float]
    """Values by series as the server writes them: ``name`` or ``name{label="value"}``."""
