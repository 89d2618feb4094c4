"""One choice of one request on its way through the engine."""

import enum

from benchctl.sim.answer import Answer
from benchctl.sim.guidance import GuidedRow
from benchctl.sim.request import Request


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """The engine's view of one choice.

    ``num_computed`` is the progress of prefill; while a sequence decodes, all its tokens but the newest are
    computed, and it is not updated. ``block_table`` holds room for every computed token. ``next_event`` is the
    number of tokens at which the sequence ends or needs a block.
    """

    __slots__ = (
        "answer",
        "arrival_ns",
        "block_table",
        "choice",
        "first_token_ns",
        "guided",
        "is_greedy",
        "last_token_ns",
        "next_event",
        "num_cached",
        "num_computed",
        "num_tokens",
        "prompt_tokens",
        "request",
        "seq_id",
        "status",
    )

    def __init__(
        self, seq_id: int, request: Request, choice: int, answer: Answer, guided: GuidedRow | None
    ) -> None:
        self.seq_id = seq_id
        """Number in the order of arrival."""
        self.request = request
        self.choice = choice
        self.answer = answer
        self.guided = guided
        self.is_greedy = request.sampling.is_greedy
        self.status = SequenceStatus.WAITING
        self.prompt_tokens = request.prompt.num_tokens
        self.num_tokens = self.prompt_tokens
        self.num_computed = 0
        self.num_cached = 0
        self.block_table: list[int] = []
        self.next_event = 0
        self.arrival_ns = 0
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_tokens

    @property
    def end(self) -> int:
        """Number of tokens at which the answer is complete."""
        return self.prompt_tokens + self.answer.num_tokens
