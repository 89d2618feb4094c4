"""A run that would make a step-time model better: the result of a diagnosis, and the input of a profile."""

from dataclasses import dataclass
from typing import Final

_WAVES: Final = 2
_FEWEST_REQUESTS: Final = 4


def num_requests(concurrency: int) -> int:
    """Requests of a run: twice as many as are open, and at least four."""
    return max(_FEWEST_REQUESTS, _WAVES * concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunToAdd:
    """Requests of one shape at one concurrency, and the reason to measure them.

    ``prompt_tokens`` and ``output_tokens`` are those of every request, and all prompts differ; ``concurrency``
    requests are open at a time. ``model`` and ``tensor_parallel`` are None where any will do.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    reason: str
    coefficients: tuple[str, ...] = ()
    """The coefficients that this run determines better."""
    model: str | None = None
    tensor_parallel: int | None = None
