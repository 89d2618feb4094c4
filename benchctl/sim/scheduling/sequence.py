"""One choice of one request on its way through the engine."""

import enum
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, TypeAlias

from benchctl.sim.requests.answer import Answer, PlannedAnswers
from benchctl.sim.requests.request import Request

if TYPE_CHECKING:
    from collections.abc import Hashable

    from benchctl.sim.guided.guidance import GuidedRow


Prefills: TypeAlias = Items["tuple[Sequence, int]"]
"""Sequences in prefill, each with the tokens computed for it in a step."""


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class StepClock:
    """The number of steps that an engine has run: what the lengths of its decoding rows are counted from."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0


class Sequence:
    """The engine's view of one choice.

    A decoding sequence gains one token with each step, so its length is kept as a distance to the clock of steps:
    nothing is written in a row until it ends, or loses its memory. ``num_computed`` is the progress of prefill;
    while a sequence decodes, all its tokens but the newest are computed, and it is not updated. ``block_keys``
    identifies the blocks of its prompt that may be shared, None for one that is not; its other blocks are counted.
    """

    __slots__ = (
        "_answers",
        "_clock",
        "_tokens",
        "arrival_ns",
        "block_keys",
        "choice",
        "end",
        "first_token_ns",
        "guided",
        "is_greedy",
        "join",
        "last_token_ns",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "prompt_tokens",
        "rank",
        "request",
        "seq_id",
        "status",
    )

    def __init__(
        self, seq_id: int, request: Request, choice: int, answers: PlannedAnswers, arrival_ns: int
    ) -> None:
        self.seq_id = seq_id
        """Number in the order of arrival."""
        self.request = request
        self.choice = choice
        self.guided: GuidedRow | None = None
        self.is_greedy = request.sampling.is_greedy
        self.prompt_tokens = request.prompt.num_tokens
        self.end = self.prompt_tokens + answers.num_tokens[choice]
        """Number of tokens at which the answer is complete."""
        self.rank = (0, seq_id)
        """Sequences of a lower rank go first."""
        self.status = SequenceStatus.WAITING
        self.join = 0
        """Number of the last time that a sequence of this engine began to decode: the order of rows."""
        self.num_computed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.block_keys: list[Hashable | None] = []
        self.arrival_ns = arrival_ns
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self._answers = answers
        self._tokens = self.prompt_tokens
        self._clock: StepClock | None = None

    @property
    def num_tokens(self) -> int:
        return self._tokens if self._clock is None else self._tokens + self._clock.step

    @property
    def num_output(self) -> int:
        return min(self.num_tokens, self.end) - self.prompt_tokens

    @property
    def answer(self) -> Answer:
        return self._answers.answer(self.choice)

    @property
    def lead(self) -> int:
        """Tokens of a decoding sequence minus the steps of the clock, a constant."""
        return self._tokens

    @property
    def is_decoding(self) -> bool:
        return self._clock is not None

    def begin_decoding(self, clock: StepClock) -> None:
        """Count the first sampled token, and from now on one with each step."""
        self._tokens += 1 - clock.step
        self._clock = clock

    def end_decoding(self) -> None:
        """Fix the length; a closing step has added no token."""
        self._tokens = min(self.num_tokens, self.end)
        self._clock = None
