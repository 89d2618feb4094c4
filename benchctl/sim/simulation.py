"""The result of a simulation: steps and requests as columns, and as records where one is asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import overload

from benchctl.records.columns import Integers, StepColumns
from benchctl.records.schema import StepRecord
from benchctl.sim.answers import Answer, PlannedAnswers
from benchctl.sim.arrivals import SimLoad
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import cost_model_for
from benchctl.sim.requests import Request
from benchctl.sim.steps import StepLog, columns_of, first_steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestColumns:
    """Finished choices in the order of their end; each array has one value a choice. Times are virtual ns."""

    load: Integers
    """Index of the load that the request belongs to."""
    index: Integers
    """Index of the request within its load."""
    choice: Integers
    """Number of the choice within its request, from 0."""
    entry: Integers
    """Number of the choice in the order in which they entered the queue, from 1."""
    arrival_ns: Integers
    """The request entered the queue."""
    first_token_ns: Integers
    last_token_ns: Integers
    prompt_tokens: Integers
    output_tokens: Integers
    cached_tokens: Integers
    """Prompt tokens that a shared prefix spared when the request last began."""
    preemptions: Integers
    """Times that the choice lost its key-value memory."""

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """One choice of a request after its end, in the order of RequestColumns; times are virtual ns."""

    config: SimConfig
    request: Request
    choice: int
    seq_id: int
    arrival_ns: int
    first_token_ns: int
    last_token_ns: int
    prompt_tokens: int
    num_output: int
    num_cached: int
    num_preemptions: int

    @property
    def answer(self) -> Answer:
        return PlannedAnswers(self.request, cost_model_for(self.config).answer_length).answer(self.choice)


class LoggedSteps(Sequence[StepRecord]):
    """The steps of a log, made into records one at a time."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._first_steps = first_steps(log)

    def __len__(self) -> int:
        return len(self._log)

    def __iter__(self) -> Iterator[StepRecord]:
        return self._log.records()

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StepRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        if isinstance(index, slice):
            return tuple(map(self._record, range(len(self))[index]))
        return self._record(range(len(self))[index])

    def _record(self, position: int) -> StepRecord:
        stretch = int(self._first_steps.searchsorted(position, side="right")) - 1
        first = int(self._first_steps[stretch])
        return self._log.record(stretch, first, position - first)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """Steps and requests of one server life."""

    config: SimConfig
    loads: tuple[SimLoad, ...]
    log: StepLog
    requests: RequestColumns
    num_preemptions: int
    num_queried_tokens: int
    """Prompt tokens that a prefix cache was asked for, and those that it had."""
    num_hit_tokens: int

    @property
    def steps(self) -> LoggedSteps:
        """All steps in their order."""
        return LoggedSteps(self.log)

    @property
    def sequences(self) -> tuple[FinishedSequence, ...]:
        """Finished sequences in the order of their end."""
        columns = self.requests
        values = zip(*(getattr(columns, field.name).tolist() for field in fields(columns)), strict=True)
        return tuple(
            FinishedSequence(self.config, self.loads[load].requests[index], *others)
            for load, index, *others in values
        )

    def step_columns(self, *, is_warmup: bool = False) -> StepColumns:
        """The steps of the load, or those of the warm-up, as columns."""
        return columns_of(self.log, is_warmup=is_warmup)

    def measured_steps(self) -> tuple[StepRecord, ...]:
        return tuple(step for step in self.steps if not step.is_warmup)

    def makespan_ns(self) -> int:
        """From the first measured step's start to the last one's end."""
        columns = self.step_columns()
        return int(columns.start_ns[-1] + columns.dur_ns[-1] - columns.start_ns[0]) if len(columns) else 0
