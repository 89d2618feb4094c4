"""The requests of a simulation as columns of numbers, for loads that are too large for an object each."""

from dataclasses import dataclass

from benchctl.records.columns import Integers


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
