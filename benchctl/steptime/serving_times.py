"""Times of requests of one size on one server, as functions of the batch that they share.

A step that decodes N rows takes t(N); a prompt adds p = t(N rows and chunks) - t(N rows) to steps that decode N.
``queueing.py`` solves for the batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from benchctl.errors import UsageError
from benchctl.steptime.work import StepWork, one_step

StepSeconds: TypeAlias = Callable[[StepWork], float]
"""Duration of a step in seconds, from its work."""


DEFAULT_MAX_NUM_SEQS: Final = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS: Final = 8192
"""Limits of a step where nothing states them; those of vLLM."""
_GRID_POINTS: Final = 48
_GRID_SPREAD: Final = 7.0
"""The grid of batches is geometric: its last interval is about e^7 times its first."""
_BISECTIONS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """Mean tokens of a request's prompt and of its output; ``cached_tokens`` of the prompt are not computed."""

    prompt_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0

    def __post_init__(self) -> None:
        if not (self.prompt_tokens >= 1 and self.output_tokens >= 1):
            raise UsageError(
                f"a request of {self.prompt_tokens:g} prompt and {self.output_tokens:g} output tokens has no load; "
                "both must be at least 1"
            )

    @property
    def decode_steps(self) -> float:
        """Steps after the one that ends the prompt, which gives the first token."""
        return self.output_tokens - 1

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of a decoding row, on average over its steps."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of a server; ``kv_tokens`` is the capacity of its cache, None for one without limit."""

    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    kv_tokens: float | None = None

    def rows(self, size: RequestSize) -> float:
        """Requests of this size that run together: the batch limit, or what fits into the cache."""
        fitting = math.inf if self.kv_tokens is None else self.kv_tokens / size.mean_context
        return max(1.0, min(float(self.max_num_seqs), fitting))


class ServingTimes:
    """Times of one request size on one server, as functions of the batch."""

    def __init__(self, size: RequestSize, step_s: StepSeconds, limits: ServerLimits) -> None:
        self.size = size
        self.max_rows = limits.rows(size)
        self._step_s = step_s
        self._budget = limits.max_num_batched_tokens
        self._new_tokens = max(1.0, size.prompt_tokens - size.cached_tokens)

    def decode_s(self, rows: float) -> float:
        """A step that only decodes; 0 for none."""
        return float(self._step_s(one_step(num_decodes=rows, context=self.size.mean_context))) if rows > 0 else 0.0

    def prefill_s(self, rows: float, together: float = 1.0) -> float:
        """Time that one prompt adds to steps with ``rows`` rows, where ``together`` prompts share a step.

        Below one row it is weighted between none and one: ``rows`` is the share of prompts that meet one.
        """
        if rows >= 1 or rows <= 0:
            return self._added_s(max(rows, 0.0), together)
        return (1 - rows) * self._added_s(0, together) + rows * self._added_s(1, together)

    def chunks(self, rows: float) -> float:
        """Steps that carry a part of one prompt."""
        return float(math.ceil(self._new_tokens / self._room(rows)))

    def most_together(self, rows: float) -> float:
        """Prompts that fit into one step."""
        return max(1.0, self._room(rows) / self._new_tokens)

    def _room(self, rows: float) -> float:
        return max(1.0, self._budget - rows)

    def _added_s(self, rows: float, together: float) -> float:
        context, alone, added_s = self.size.mean_context, self.decode_s(rows), 0.0
        start = self.size.prompt_tokens - self._new_tokens
        while start < self.size.prompt_tokens:
            chunk = min(self._room(rows), self.size.prompt_tokens - start)
            work = one_step(
                num_decodes=rows, context=context, num_prefills=together, prompt_tokens=chunk, prompt_context=start
            )
            added_s += max(0.0, float(self._step_s(work)) - alone)
            start += chunk
        return added_s / together

    def closed_rate(self, requests: float) -> float:
        """Requests per second of a loop that keeps so many open, all of which are in the batch."""
        rows, chunks = max(0.0, requests - 1), self.chunks(requests - 1)
        steps = self.size.decode_steps + chunks
        together = min(max(1.0, requests * chunks / steps), self.most_together(rows))
        rows = min(rows, self.size.decode_steps * together / chunks)
        shared = chunks / together
        pure = max(0.0, steps / requests - shared)
        return 1 / (self.prefill_s(rows, together) + shared * self.decode_s(rows) + pure * self.decode_s(requests))

    def open_prefill_s(self, batch: float, rate: float) -> float:
        """As ``prefill_s`` for prompts that arrive at this rate, of which more share a step the longer it takes."""
        most, together = self.most_together(batch), 1.0
        decode_s = self.decode_s(batch) if self.size.decode_steps else 0.0
        while True:
            prompt_s = self.prefill_s(batch, together)
            free = 1 - rate * prompt_s
            arrivals = rate * decode_s / free if free > 0 else math.inf
            if arrivals <= together or together >= most:
                return prompt_s
            together = min(2 * together, most)

    def decoding_s(self, batch: float, rate: float) -> float:
        """Time from the first to the last token of a request that shares its steps with ``batch`` others."""
        rows = min(batch + 1, self.max_rows)
        prompt_s = self.open_prefill_s(rows, rate)
        free = 1 - rate * prompt_s
        if free <= 0:
            return math.inf
        return self.size.decode_steps * self.decode_s(rows) / free + rate * prompt_s * prompt_s

    def needed_batch(self, batch: float, rate: float) -> float:
        """Rows that decode at this rate while others see a batch of this size."""
        return rate * self.decoding_s(batch, rate)

    def batch_at(self, rate: float) -> float:
        """The smallest batch that needs no more rows than itself: bracketed on a grid, then bisected."""
        if not self.size.decode_steps:
            return 0.0
        low, high = 0.0, self.max_rows
        for i in range(1, _GRID_POINTS + 1):
            candidate = self.max_rows * math.expm1(_GRID_SPREAD * i / _GRID_POINTS) / math.expm1(_GRID_SPREAD)
            if self.needed_batch(candidate, rate) <= candidate:
                high = candidate
                break
            low = candidate
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.needed_batch(middle, rate) <= middle else (middle, high)
        return high
