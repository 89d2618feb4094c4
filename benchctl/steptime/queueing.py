"""Load of a server before it is measured: Little's law over a step-time model, as a fixed point.

A server with continuous batching works on one step after another. A request with P prompt and O output tokens takes
part in k steps with chunks of its prompt, and in O - 1 decoding steps. Its chunks add p = t(N rows and chunks) -
t(N rows) to steps that decode N rows.

Open load, lambda requests per second that arrive at random: their prompts take the share lambda p of all time, and
a row shares its steps with N others on average, so that it advances by one token every

    u = t(N + 1) / (1 - lambda p),        N = lambda ((O - 1) u + lambda p^2)     (Little's law over the rows),

where lambda p prompts arrived while a row's own was computed and now delay it. The smallest solution N is the load.
A prompt waits for half of a step, and for the prompts before it as in
a queue with random arrivals and constant service: (lambda p) p / (2 (1 - lambda p)).

Closed loop of C requests: of the steps that a request takes part in, O - 1 + k, each serves C requests, and k of
them carry its prompt, so that with X requests per second

    1 / X = p + k t(C - 1) + ((O - 1 + k) / C - k) t(C).

A server completes no more than X of the largest batch that its limits and its memory allow; the offered rate over
that is the utilisation.

Mean lengths stand for their distributions, and t is taken at the mean batch: a prediction for planning, which the
simulator refines.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from benchctl.costs.roofline import forward_bytes, forward_flops, roofline_ns
from benchctl.errors import UsageError
from benchctl.steptime.work import Deployment, StepWork, one_step
from benchctl.units import NS_PER_S, US_PER_S

if TYPE_CHECKING:
    from benchctl.steptime.model import StepTimeModel

StepSeconds: TypeAlias = Callable[[StepWork], float]
"""Duration of a step in seconds, from its work."""

DEFAULT_MAX_NUM_SEQS: Final = 256
_GRID_POINTS: Final = 48
_GRID_SPREAD: Final = 7.0
"""The grid of batches is geometric: its last interval is about e^7 times its first."""
_BISECTIONS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """Mean tokens of a request's prompt and of its output, each at least 1; ``cached_tokens`` are not computed."""

    prompt_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0

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
    # Limits of a step where nothing states them; those of vLLM
    max_num_batched_tokens: int = 8192
    kv_tokens: float | None = None

    def rows(self, size: RequestSize) -> float:
        """Requests of this size that run together: the batch limit, or what fits into the cache."""
        fitting = math.inf if self.kv_tokens is None else self.kv_tokens / size.mean_context
        return max(1.0, min(float(self.max_num_seqs), fitting))


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedLoad:
    """Load of a server at its steady state.

    ``concurrency`` counts requests in the server and ``batch`` those that decode; both are bounded by the limits
    where the server is saturated, while the queue before it grows for as long as the load lasts. ``utilisation`` is
    the offered rate over the largest that the server completes, and for a fixed concurrency over the rows that fit.
    """

    concurrency: float
    batch: float
    utilisation: float
    requests_per_s: float
    """Rate at which requests complete."""
    max_requests_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float
    """Prompt and output tokens together."""
    kv_tokens: float
    """Tokens in the cache on average."""
    ttft_s: float
    """Without the wait in the queue of a saturated server, which has no steady state."""
    tpot_s: float
    e2el_s: float

    @property
    def is_saturated(self) -> bool:
        return self.utilisation >= 1


def load_at_rate(
    rate_per_s: float, size: RequestSize, step_s: StepSeconds, limits: ServerLimits | None = None
) -> PredictedLoad:
    """The load of requests that arrive at random at so many per second, whatever the server does.

    Raises UsageError for a rate that is not above 0.
    """
    if not (rate_per_s > 0 and math.isfinite(rate_per_s)):
        raise UsageError(f"a rate of {rate_per_s:g} requests per second has no load; it must be above 0")
    server = _Server(size, step_s, limits or ServerLimits())
    most = server.closed_rate(server.max_rows)
    if rate_per_s >= most:
        return server.closed_load(server.max_rows, utilisation=rate_per_s / most)
    batch = server.batch_at(rate_per_s)
    prompt_s = server.open_prompt_s(batch, rate_per_s)
    busy = min(rate_per_s * prompt_s, 0.999)
    decode_s = server.decode_s(min(batch + 1, server.max_rows)) if size.decode_steps else 0.0
    half_step_s = min(batch, 1.0) * decode_s / 2
    queue_s = busy * prompt_s / (2 * (1 - busy))
    return server.load(
        rate=rate_per_s,
        batch=batch,
        utilisation=rate_per_s / most,
        ttft_s=half_step_s + queue_s + prompt_s + server.decode_s(batch if batch >= 1 else 0.0),
        tpot_s=server.decoding_s(batch, rate_per_s) / size.decode_steps if size.decode_steps else 0.0,
    )


def load_at_concurrency(
    concurrency: float, size: RequestSize, step_s: StepSeconds, limits: ServerLimits | None = None
) -> PredictedLoad:
    """The load of a closed loop, which keeps so many requests open, at least 1.

    Its utilisation is the share of the largest batch; above 1, requests wait in a queue.
    """
    server = _Server(size, step_s, limits or ServerLimits())
    return server.closed_load(min(concurrency, server.max_rows), utilisation=concurrency / server.max_rows)


class _Server:
    """Times of requests of one size on one server, as functions of the batch that they share."""

    def __init__(self, size: RequestSize, step_s: StepSeconds, limits: ServerLimits) -> None:
        self.size = size
        self.max_rows = limits.rows(size)
        self._step_s = step_s
        self._budget = limits.max_num_batched_tokens
        self._new_tokens = max(1.0, size.prompt_tokens - size.cached_tokens)

    def decode_s(self, rows: float) -> float:
        """A step that only decodes; 0 for none."""
        return float(self._step_s(one_step(num_decodes=rows, context=self.size.mean_context))) if rows > 0 else 0.0

    def _prompt_s(self, rows: float, together: float = 1.0) -> float:
        """Time that one prompt adds to steps with ``rows`` rows, where ``together`` prompts share a step.

        Below one row it is weighted between none and one: ``rows`` is the share of prompts that meet one.
        """
        if 0 < rows < 1:
            return (1 - rows) * self._prompt_s(0, together) + rows * self._prompt_s(1, together)
        alone_s, added_s = self.decode_s(rows), 0.0
        start = self.size.prompt_tokens - self._new_tokens
        while start < self.size.prompt_tokens:
            chunk = min(self._room(rows), self.size.prompt_tokens - start)
            work = one_step(
                num_decodes=rows,
                context=self.size.mean_context,
                num_prefills=together,
                prompt_tokens=chunk,
                prompt_context=start,
            )
            added_s += max(0.0, float(self._step_s(work)) - alone_s)
            start += chunk
        return added_s / together

    def _room(self, rows: float) -> float:
        """Prompt tokens that fit into a step beside its rows."""
        return max(1.0, self._budget - rows)

    def _chunks(self, rows: float) -> float:
        """Steps that carry a part of one prompt."""
        return float(math.ceil(self._new_tokens / self._room(rows)))

    def _most_together(self, rows: float) -> float:
        """Prompts that fit into one step."""
        return max(1.0, self._room(rows) / self._new_tokens)

    def closed_rate(self, requests: float) -> float:
        """Requests per second of a loop that keeps so many open, all of which are in the batch."""
        rows, chunks = max(0.0, requests - 1), self._chunks(requests - 1)
        steps = self.size.decode_steps + chunks
        together = min(max(1.0, requests * chunks / steps), self._most_together(rows))
        rows = min(rows, self.size.decode_steps * together / chunks)
        shared = chunks / together
        pure = max(0.0, steps / requests - shared)
        return 1 / (self._prompt_s(rows, together) + shared * self.decode_s(rows) + pure * self.decode_s(requests))

    def closed_load(self, requests: float, *, utilisation: float) -> PredictedLoad:
        """The load of a loop that keeps so many requests open, all of which are in the batch."""
        rate, decode_steps, rows = self.closed_rate(requests), self.size.decode_steps, max(0.0, requests - 1)
        e2el_s = requests / rate
        ttft_s = self._prompt_s(rows) + self._chunks(rows) * self.decode_s(rows)
        ttft_s = min(ttft_s, e2el_s) if decode_steps else e2el_s
        return self.load(
            rate=rate,
            batch=max(0.0, requests - rate * ttft_s),
            utilisation=utilisation,
            ttft_s=ttft_s,
            tpot_s=(e2el_s - ttft_s) / decode_steps if decode_steps else 0.0,
        )

    def load(self, *, rate: float, batch: float, utilisation: float, ttft_s: float, tpot_s: float) -> PredictedLoad:
        """The load with everything that follows from these numbers."""
        e2el_s = ttft_s + self.size.decode_steps * tpot_s
        return PredictedLoad(
            concurrency=rate * e2el_s,
            batch=batch,
            utilisation=utilisation,
            requests_per_s=rate,
            max_requests_per_s=self.closed_rate(self.max_rows),
            output_tokens_per_s=rate * self.size.output_tokens,
            tokens_per_s=rate * (self.size.output_tokens + self.size.prompt_tokens),
            kv_tokens=batch * self.size.mean_context,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            e2el_s=e2el_s,
        )

    def open_prompt_s(self, batch: float, rate: float) -> float:
        """Time that one prompt adds at this rate of arrivals, of which more share a step the longer it takes."""
        most, together = self._most_together(batch), 1.0
        decode_s = self.decode_s(batch) if self.size.decode_steps else 0.0
        while True:
            prompt_s = self._prompt_s(batch, together)
            free = 1 - rate * prompt_s
            arrivals = rate * decode_s / free if free > 0 else math.inf
            if arrivals <= together or together >= most:
                return prompt_s
            together = min(2 * together, most)

    def decoding_s(self, batch: float, rate: float) -> float:
        """Time from the first to the last token of a request that shares its steps with ``batch`` others."""
        rows = min(batch + 1, self.max_rows)
        prompt_s = self.open_prompt_s(rows, rate)
        free = 1 - rate * prompt_s
        if free <= 0:
            return math.inf
        return self.size.decode_steps * self.decode_s(rows) / free + rate * prompt_s * prompt_s

    def batch_at(self, rate: float) -> float:
        """The smallest batch that needs no more rows than itself: bracketed on a grid, then bisected."""
        if not self.size.decode_steps:
            return 0.0

        def is_enough(batch: float) -> bool:
            return rate * self.decoding_s(batch, rate) <= batch

        low, high = 0.0, self.max_rows
        for i in range(1, _GRID_POINTS):
            candidate = self.max_rows * math.expm1(_GRID_SPREAD * i / _GRID_POINTS) / math.expm1(_GRID_SPREAD)
            if is_enough(candidate):
                high = candidate
                break
            low = candidate
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return high


def kv_capacity_tokens(
    deployment: Deployment, memory_share: float = 0.9, *, draft: Deployment | None = None
) -> float:
    """Tokens of key-value cache beside the weights; 0 where the weights alone do not fit.

    (share x memory x devices - weights) / bytes of a token, without activations and graphs. The share is what
    vLLM and SGLang take of a device's memory by default. A ``draft`` model
    on the same devices has weights of its own, and keys and values of each token too. Raises UsageError for
    hardware whose memory is unknown.
    """
    hardware = deployment.hardware
    if hardware.memory_bytes is None:
        raise UsageError(
            f"hardware {hardware.name!r}: its memory is unknown; state it after the bandwidth, in GB, such as "
            "cpu:1.5:80:64"
        )
    models = [each for each in (deployment, draft) if each is not None]
    weights = sum(each.shape.weight_bytes(each.weight_bytes_per_param) for each in models)
    token_bytes = sum(each.shape.kv_bytes_per_token(each.kv_bytes_per_element) for each in models)
    free = memory_share * hardware.memory_bytes * deployment.tensor_parallel - weights
    return max(0.0, free / token_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeSource:
    """The duration of a step, and its origin in words; ``is_bound`` for times that no server can undercut."""

    step_s: StepSeconds
    words: str
    limits: ServerLimits
    is_bound: bool = False


def step_time_source(
    deployment: Deployment, model: "StepTimeModel | None" = None, *, max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
) -> StepTimeSource:
    """The step times of a fitted model or, without one, the roofline at the data sheet's peaks.

    The roofline is the larger of compute and memory traffic: real steps take longer. Raises UsageError for a device
    or a tensor-parallel size that the model was not fitted to.
    """
    shape, hardware, devices = deployment.shape, deployment.hardware, deployment.tensor_parallel
    if model is not None:
        model.check_deployment(deployment)

    def step_s(work: StepWork) -> float:
        if model is not None:
            return float(model.extrapolate_us(work, deployment)) / US_PER_S
        flops = forward_flops(
            shape,
            float(work.tokens),
            float(work.prefill_positions),
            float(work.num_sampled),
            decode_positions=float(work.decode_positions),
        )
        num_bytes = forward_bytes(shape, float(work.context + work.tokens), float(work.tokens))
        return roofline_ns(flops, num_bytes, hardware, shape.precision) / NS_PER_S / devices

    on_devices = f"{f'{devices} x ' if devices > 1 else ''}{hardware.name}"
    return StepTimeSource(
        step_s=step_s,
        words=f"{'roofline' if model is None else 'step-time model'} of {shape.name} on {on_devices}",
        limits=ServerLimits(
            max_num_seqs=max_num_seqs,
            kv_tokens=None if hardware.memory_bytes is None else kv_capacity_tokens(deployment),
        ),
        is_bound=model is None,
    )
