"""Places of this host on which blocks can be measured at the same time, each with devices or cores of its own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One place for one block at a time; no two slots share a device or a core."""

    index: int
    """Number of the slot, from 0."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its devices, as ``CUDA_VISIBLE_DEVICES`` takes them; empty on a host without any."""
    cores: tuple[int, ...] = ()
    """Processor cores of server and client; empty for all."""
