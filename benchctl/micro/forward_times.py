"""The times of the replays of one forward pass."""

from typing import Literal

import msgspec


class ForwardTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The replays of one point in one mode, one value each, in the order in which they ran."""

    clock: Literal["host", "device"]
    """``device``: pairs of events on the stream of the replay; ``host``: the monotonic clock around each."""
    start_ns: tuple[int, ...]
    """Start of each replay on the host's monotonic clock."""
    duration_ns: tuple[int, ...]
    """Duration of each replay on ``clock``."""
    wall_ns: int
    """Time of all replays together on the host's monotonic clock, up to the last synchronisation."""
    num_allocations: int = 0
    """Pieces of memory that the device handed out during the replays; 0 where buffers hold everything."""
    num_operators: int | None = None
    """Operators that one pass calls: in mode ``eager`` about as many launches."""
    output_difference: float | None = None
    """Largest difference between the outputs of ``graph`` and ``eager``, in units of the largest; None for
    ``eager``.
    """
