"""The node that measured a run: machine, devices and software, as far as they can change a number."""

from benchctl.records.record import Count, Record, Size


class GpuInfo(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One visible device."""

    index: Count
    """Number of the device on its host."""
    name: str
    """Name of the device."""
    uuid: str | None = None
    """Identity of the device."""
    memory_bytes: Size | None = None
    """Device memory."""
    driver: str | None = None
    """Version of the driver."""


class NodeGpu(GpuInfo, frozen=True, kw_only=True, omit_defaults=True):
    """One device that the run's server could see, with what limits its speed."""

    max_sm_clock_mhz: Count | None = None
    """Highest clock of the multiprocessors."""
    max_memory_clock_mhz: Count | None = None
    """Highest clock of the memory."""
    power_limit_w: float | None = None
    """Power limit in force."""
    numa_node: Count | None = None
    """NUMA node to which the device is attached."""


class NodeInfo(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The machine of one run."""

    name: str
    """Name of the node in its cluster, or of the host."""
    hostname: str
    """Name that the machine itself has."""
    job: str | None = None
    """Job of the scheduler, such as ``slurm 17_3``."""
    platform: str | None = None
    """Operating system and its version."""
    cpu_model: str | None = None
    """Name of the processor."""
    cores: str | None = None
    """Cores that benchctl could use, such as ``0-7,16-23``."""
    num_numa_nodes: Count | None = None
    """NUMA nodes of the machine."""
    memory_bytes: Size | None = None
    """Main memory."""
    gpus: tuple[NodeGpu, ...] = ()
    """Devices that the server could see."""
    build: dict[str, str] = {}
    """Versions of the packages in the server's environment that can change a number; its CUDA version, if any."""
