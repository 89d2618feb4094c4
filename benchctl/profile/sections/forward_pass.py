"""The forward pass that a run of a micro-benchmark measures, as its settings describe it."""

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


ForwardPass: TypeAlias = tuple[ForwardPoint, Mode]
"""A point, and the mode in which it is computed."""
