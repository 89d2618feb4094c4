"""Checks of the tokens of a run: those of the client, usage, the steps, and the server's counters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchctl.analysis.metrics.server_counters import GENERATED_TOKENS, PREFIX_HITS, measure_growth
from benchctl.analysis.metrics.unknown import total
from benchctl.records.request import RequestRecord
from benchctl.records.samples import PrometheusSample

if TYPE_CHECKING:
    from benchctl.records.columns.step_columns import StepColumns


@dataclass(frozen=True, slots=True)
class Check:
    """One reconciliation check. A fatal one that fails makes the measurement invalid, others cause a warning."""

    name: str
    ok: bool | None
    detail: str
    is_fatal: bool = False


def abbreviate_names(names: Sequence[str]) -> str:
    """The first three names, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def client_tokens(request: RequestRecord) -> int | None:
    """Tokens of an answer as the client counted them; None where it could not."""
    counts = ((choice.chunk_tokens, choice.output_tokens) for choice in request.choices)
    return total([output_tokens if of_chunks is None else sum(of_chunks) for of_chunks, output_tokens in counts])


def check_client_tokens(completed: Sequence[RequestRecord]) -> Check:
    """Tokens of usage = tokens that arrived at the client, request by request."""
    name, wrong, compared = "client-tokens", [], 0
    for request in completed:
        counted = client_tokens(request)
        if request.completion_tokens is None or counted is None:
            continue
        compared += 1
        if counted != request.completion_tokens:
            wrong.append(f"{request.request_id} {counted} != {request.completion_tokens}")
    if not compared:
        return Check(name, None, "no request has both usage and tokens counted by the client")
    detail = f"client and usage agree in {compared} requests"
    if wrong:
        detail = f"client and usage differ in {len(wrong)} of {compared} requests: {abbreviate_names(wrong)}"
    return Check(name, not wrong, detail, is_fatal=True)


def check_step_tokens(
    steps: "StepColumns", requests: Sequence[RequestRecord], completed: Sequence[RequestRecord]
) -> Check:
    """Sum of output tokens of steps = sum of usage, or of what the client counted where there is no usage."""
    name, by_step = "step-tokens", steps.total("output_tokens")
    tokens = [
        client_tokens(request) if request.completion_tokens is None else request.completion_tokens
        for request in completed
    ]
    source = "client" if any(request.completion_tokens is None for request in completed) else "usage"
    if by_step is None or (counted := total(tokens)) is None:
        return Check(name, None, "steps or usage do not count tokens")
    return _compare_with_usage(
        name, by_step, counted, f"steps {by_step}", is_whole=len(completed) == len(requests), source=source
    )


def check_counters(
    samples: Sequence[PrometheusSample], requests: Sequence[RequestRecord], completed: Sequence[RequestRecord]
) -> Check:
    """Growth of the server's token counter during the load = sum of usage."""
    name, grown = "counters", measure_growth(samples, GENERATED_TOKENS)
    by_usage = total([request.completion_tokens for request in completed])
    if grown is None or by_usage is None:
        return Check(name, None, "no two readings of a counter of output tokens, or no usage")
    growth = f"{grown.name} grew by {grown.count}"
    return _compare_with_usage(name, grown.count, by_usage, growth, is_whole=len(completed) == len(requests))


def _compare_with_usage(
    name: str, count: int, usage: int, observed: str, *, is_whole: bool, source: str = "usage"
) -> Check:
    detail = f"{observed}, {source} {usage}"
    if not is_whole:
        return Check(name, None, f"{detail}; failed requests took tokens that no usage counts")
    return Check(name, count == usage, detail, is_fatal=True)


def check_prefix_cache(
    samples: Sequence[PrometheusSample],
    requests: Sequence[RequestRecord],
    steps: "StepColumns",
    *,
    is_allowed: bool,
) -> Check:
    """No prompt token of the load came from a cache, by the server's counter, by usage and by the steps.

    Cached tokens cost nothing, so a run with a warmer cache would look faster. With ``is_allowed`` hits are part of
    the experiment and only reported.
    """
    name, grown = "prefix-cache", measure_growth(samples, PREFIX_HITS)
    by_usage = [request for request in requests if request.cached_tokens is not None]
    records = [] if grown is None else [f"{grown.name} grew by {grown.count}"]
    if by_usage:
        cached = sum(request.cached_tokens or 0 for request in by_usage)
        records.append(f"usage says that {cached} prompt tokens of {len(by_usage)} requests came from a cache")
    uncomputed = _uncomputed_tokens(steps, requests)
    if uncomputed is not None:
        records.append(f"steps left out {uncomputed} of the prompt tokens that usage counts")
    if not records:
        return Check(name, None, "neither counters nor usage nor steps record hits in a prefix cache")
    detail = "; ".join(records)
    has_hits = bool(grown and grown.count) or any(request.cached_tokens for request in by_usage) or bool(uncomputed)
    if not has_hits:
        return Check(name, ok=True, detail=detail, is_fatal=True)
    if is_allowed:
        return Check(name, None, f"{detail}; the profile allows it (workload.allow_prefix_cache_hits)")
    remedy = (
        "switch the server's prefix cache off (enable_prefix_caching: false; of an attached server leave "
        "bypass_prefix_cache on, with its dialect and samples_as: requests), or set "
        "workload.allow_prefix_cache_hits: true"
    )
    return Check(name, ok=False, detail=f"{detail}; {remedy}", is_fatal=True)


def _uncomputed_tokens(steps: "StepColumns", requests: Sequence[RequestRecord]) -> int | None:
    """Prompt tokens of usage that no step computed, for servers that report hits nowhere else.

    At least 0, because a step may compute a prompt again. None unless the steps count all output tokens of usage.
    """
    prompt = total([request.prompt_tokens for request in requests])
    output = total([request.completion_tokens for request in requests])
    computed = steps.total("num_prefill_tokens")
    if prompt is None or output is None or computed is None or steps.total("output_tokens") != output:
        return None
    return max(0, prompt - computed)
