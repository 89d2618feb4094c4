"""Drafts of one sequence: how many of them each verification accepts."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from benchctl.profile.choices import acceptance_by_position
from benchctl.sim.config import SimConfig
from benchctl.sim.scheduling.sequence import Sequence, StepClock
from benchctl.steptime.speculation.law import survival
from benchctl.workload.seeded import named_stream


class DraftingRow:
    """A sequence that decodes: a clock for its length, its blocks, and its stream of acceptances.

    One uniform number u decides a verification: the first i drafts are accepted where u < P(i). ``negated`` has
    -P(1) to -P(K), which ascend.
    """

    __slots__ = ("_clock", "_draw", "_negated", "is_behind", "num_blocks", "num_drafts", "num_tokens")

    def __init__(self, negated: tuple[float, ...], draw: Callable[[], float]) -> None:
        self._negated = negated
        self._draw = draw
        self._clock = StepClock()
        self.num_tokens = 0
        """Length of the sequence."""
        self.num_blocks = 0
        """Blocks of the sequence, those that rejected drafts have filled among them."""
        self.num_drafts = 0
        """Tokens drafted in the present step."""
        self.is_behind = False
        """Whether the draft model lacks the token before the newest one, because that one was a bonus token."""

    def begin(self, seq: Sequence, num_blocks: int) -> None:
        """Let a sequence decode from now on, which holds so many blocks."""
        self._clock = StepClock()
        seq.begin_decoding(self._clock)
        self.num_tokens, self.num_blocks, self.is_behind = seq.num_tokens, num_blocks, False

    def gain(self, num_tokens: int) -> None:
        """Lengthen the sequence."""
        self._clock.step += num_tokens
        self.num_tokens += num_tokens

    def num_accepted(self) -> int:
        """Accepted drafts of the next verification."""
        return min(bisect_left(self._negated, -self._draw()), self.num_drafts)


class Drafting:
    """Makes the rows of a server. Each has a stream of its own, so that its tokens do not depend on other rows.

    A stream is that of the request and of the server life (``noise_seed``): two lives differ in the drafts that
    they accept, as two real servers do, and one life repeated does not.
    """

    def __init__(self, config: SimConfig) -> None:
        """Raises UsageError for an acceptance outside of 0 to 1."""
        num_drafts, acceptance = config.num_speculative_tokens, acceptance_by_position(config.acceptance)
        self._acceptance: Final = (acceptance * num_drafts if len(acceptance) == 1 else acceptance)[:num_drafts]
        self._spread: Final = config.acceptance_spread
        self._noise_seed: Final = config.noise_seed
        self._negated: Final = _negated(self._acceptance)

    def row_of(self, seq: Sequence) -> DraftingRow:
        """The row of a sequence that begins to decode."""
        request = seq.request
        name = f"drafts:{self._noise_seed}:{request.prompt.digest}:{seq.choice}"
        draw = named_stream(request.seed, name).random
        if not self._spread:
            return DraftingRow(self._negated, draw)
        shift = self._spread * (2 * draw() - 1)
        return DraftingRow(_negated(tuple(a + shift * min(a, 1 - a) for a in self._acceptance)), draw)


def _negated(acceptance: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(-probability for probability in survival(acceptance)[1:])
