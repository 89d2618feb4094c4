"""The decoding rows that ask for guidance, scored one by one."""

from collections.abc import Callable
from typing import Final

from benchctl.guided.params import REVISIONS_THAT_SKIP
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import GuidedDecodeCost
from benchctl.sim.guidance import (
    REPEATS_FROM_TOKENS,
    UNGUIDED,
    CandidateLaw,
    GuidedRow,
    GuidedStep,
    score_rows,
)
from benchctl.sim.sequences import Prefills, Sequence
from benchctl.sim.steps import StepLog
from benchctl.sim.walk import Course, Progress
from benchctl.workload.seeded import named_stream


class GuidedRows:
    """Each row has a stream of its own, so that its counts do not depend on the rows beside it."""

    def __init__(self, config: SimConfig) -> None:
        self.config: Final = config
        self._rows: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, seq: Sequence) -> GuidedRow | None:
        """The guidance of a sequence at its start, None where nothing guides it."""
        request, guidance = seq.request, seq.request.guidance
        if (
            guidance is None
            or seq.is_greedy
            or (guidance.is_neutral and self.config.revision in REVISIONS_THAT_SKIP)
        ):
            return None
        return GuidedRow(
            CandidateLaw.of(guidance, request.sampling, self.config.revision),
            prompt_tokens=seq.prompt_tokens,
            draw=self._draw_of(seq),
            repeats_from=None if request.ignore_eos else seq.prompt_tokens + REPEATS_FROM_TOKENS,
        )

    def join(self, seq: Sequence) -> None:
        """Take in a row that begins to decode."""
        self._rows[seq] = None

    def leave(self, seq: Sequence) -> None:
        """Let go of a row, if it is one of these."""
        self._rows.pop(seq, None)

    def score(self, prefills: Prefills) -> GuidedStep:
        """Score the rows that sample in the next step, those of ``prefills`` that complete a prompt among them."""
        rows = [(seq.guided, seq.num_tokens) for seq in self._rows if seq.guided is not None]
        rows += sampling_rows(prefills)
        return score_rows(rows, self.config.revision) if rows else UNGUIDED

    def walk(self, course: Course, cost: GuidedDecodeCost, log: StepLog) -> Progress:
        """Run decode steps of the present batch and append their columns; rows with streams of their own cannot."""
        raise NotImplementedError

    def _draw_of(self, seq: Sequence) -> Callable[[], float]:
        request = seq.request
        return named_stream(request.seed, f"candidates:{request.prompt.digest}:{seq.choice}").random


def sampling_rows(prefills: Prefills) -> list[tuple[GuidedRow, int]]:
    """The guided rows whose prompts end in this step."""
    return [
        (seq.guided, seq.num_tokens)
        for seq, num_tokens in prefills
        if seq.guided is not None and seq.num_computed + num_tokens == seq.num_tokens
    ]
