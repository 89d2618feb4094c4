"""The forward pass that is measured, and the times of its replays."""

from typing import Final, Literal, TypeAlias, get_args

import msgspec

Phase: TypeAlias = Literal["decode", "prefill"]
Mode: TypeAlias = Literal["eager", "graph"]
"""``eager`` launches every kernel from the host; ``graph`` replays a captured CUDA graph."""
KvLayout: TypeAlias = Literal["contiguous", "paged"]
DataType: TypeAlias = Literal["float32", "bfloat16", "float16"]

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
MODES: Final[tuple[Mode, ...]] = get_args(Mode)


class ForwardPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass over a batch of equal sequences.

    A decode has one new token for each sequence; a prefill has ``new_tokens`` for each, by the attention path of
    prompts. All of them see ``context_tokens`` that are in the cache already.
    """

    phase: Phase
    batch_size: int
    new_tokens: int = 1
    """New tokens of one sequence."""
    context_tokens: int = 0
    """Tokens of one sequence whose keys and values the cache holds before the pass."""

    @property
    def total_new_tokens(self) -> int:
        """New tokens of the whole batch."""
        return self.batch_size * self.new_tokens


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
