"""One choice of one request on its way through the engine."""

import enum
from dataclasses import dataclass, field

from benchctl.sim.answer import Answer
from benchctl.sim.guidance import GuidedRow
from benchctl.sim.request import Request


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The engine's view of one choice.

    ``num_computed`` is the progress of prefill; while a sequence decodes, all its tokens but the newest are
    computed, and it is not updated. ``block_table`` holds room for every computed token. ``next_event`` is the
    number of tokens at which the sequence ends or needs a block.
    """

    seq_id: int
    """Number in the order of arrival."""
    request: Request
    choice: int
    answer: Answer
    guided: GuidedRow | None
    is_greedy: bool = field(init=False)
    prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    next_event: int = 0
    arrival_ns: int = 0
    first_token_ns: int | None = None
    last_token_ns: int | None = None

    def __post_init__(self) -> None:
        self.is_greedy = self.request.sampling.is_greedy
        self.num_tokens = self.prompt_tokens = self.request.prompt.num_tokens

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_tokens

    @property
    def end(self) -> int:
        """Number of tokens at which the answer is complete."""
        return self.prompt_tokens + self.answer.num_tokens
