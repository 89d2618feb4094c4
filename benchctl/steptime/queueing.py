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
from dataclasses import dataclass
from typing import Final

from benchctl.errors import UsageError
from benchctl.steptime.serving_times import RequestSize, ServerLimits, ServingTimes, StepSeconds
from benchctl.steptime.work import Deployment

MEMORY_SHARE: Final = 0.9
"""Share of a device's memory that weights and key-value cache take, as vLLM and SGLang have it by default."""
_MOST_BUSY: Final = 0.999


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
    server = ServingTimes(size, step_s, limits or ServerLimits())
    most = server.closed_rate(server.max_rows)
    if rate_per_s >= most:
        return _closed_load(server, server.max_rows, utilisation=rate_per_s / most)
    batch = server.batch_at(rate_per_s)
    prompt_s = server.open_prefill_s(batch, rate_per_s)
    busy = min(rate_per_s * prompt_s, _MOST_BUSY)
    decode_s = server.decode_s(min(batch + 1, server.max_rows)) if size.decode_steps else 0.0
    half_step_s = min(batch, 1.0) * decode_s / 2
    queue_s = busy * prompt_s / (2 * (1 - busy))
    return _predicted_load(
        server,
        rate=rate_per_s,
        batch=batch,
        utilisation=rate_per_s / most,
        ttft_s=half_step_s + queue_s + prompt_s + server.decode_s(batch if batch >= 1 else 0.0),
        tpot_s=server.decoding_s(batch, rate_per_s) / size.decode_steps if size.decode_steps else 0.0,
    )


def load_at_concurrency(
    concurrency: float, size: RequestSize, step_s: StepSeconds, limits: ServerLimits | None = None
) -> PredictedLoad:
    """The load of a closed loop, which keeps so many requests open.

    Its utilisation is the share of the largest batch; above 1, requests wait in a queue. Raises UsageError for a
    concurrency below 1.
    """
    if not (concurrency >= 1 and math.isfinite(concurrency)):
        raise UsageError(f"a concurrency of {concurrency:g} has no load; it must be at least 1")
    server = ServingTimes(size, step_s, limits or ServerLimits())
    return _closed_load(server, min(concurrency, server.max_rows), utilisation=concurrency / server.max_rows)


def _closed_load(server: ServingTimes, requests: float, *, utilisation: float) -> PredictedLoad:
    rate, decode_steps = server.closed_rate(requests), server.size.decode_steps
    rows = max(0.0, requests - 1)
    ttft_s = server.prefill_s(rows) + server.chunks(rows) * server.decode_s(rows)
    ttft_s = min(ttft_s, requests / rate) if decode_steps else requests / rate
    return _predicted_load(
        server,
        rate=rate,
        batch=max(0.0, requests - rate * ttft_s),
        utilisation=utilisation,
        ttft_s=ttft_s,
        tpot_s=(requests / rate - ttft_s) / decode_steps if decode_steps else 0.0,
    )


def _predicted_load(
    server: ServingTimes, *, rate: float, batch: float, utilisation: float, ttft_s: float, tpot_s: float
) -> PredictedLoad:
    size = server.size
    e2el_s = ttft_s + size.decode_steps * tpot_s
    return PredictedLoad(
        concurrency=rate * e2el_s,
        batch=batch,
        utilisation=utilisation,
        requests_per_s=rate,
        max_requests_per_s=server.closed_rate(server.max_rows),
        output_tokens_per_s=rate * size.output_tokens,
        tokens_per_s=rate * (size.output_tokens + size.prompt_tokens),
        kv_tokens=batch * size.mean_context,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2el_s=e2el_s,
    )


def kv_capacity_tokens(
    deployment: Deployment, memory_share: float = MEMORY_SHARE, *, draft: Deployment | None = None
) -> float:
    """Tokens of key-value cache beside the weights; 0 where the weights alone do not fit.

    (share x memory x devices - weights) / bytes of a token, without activations and graphs. A ``draft`` model
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
