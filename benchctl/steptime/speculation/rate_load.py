"""Latency of speculation at a rate of requests, where faster sequences leave a smaller batch behind.

``queueing.py`` solves for the batch of requests that arrive at random. A server that speculates is one whose rows
need T(B, K) / E for a token instead of T(B, 0), and whose prompts add to a step with drafts: the target's time
beyond that step, and a pass of the draft over the same prompt. The last step of a request is taken to be worth E
tokens like the others, though ``max_tokens`` may cut it.
"""

from dataclasses import dataclass, replace

from benchctl.steptime.queueing import PredictedLoad, load_at_rate
from benchctl.steptime.serving_times import RequestSize, ServerLimits, StepSeconds
from benchctl.steptime.speculation.batch_load import Speculation
from benchctl.steptime.work import StepWork, one_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLoad:
    """One rate of requests, with the load for each number of draft tokens, 0 first."""

    rate_per_s: float
    loads: tuple[tuple[int, PredictedLoad], ...]

    @property
    def without(self) -> PredictedLoad:
        """The load without speculation."""
        return self.loads[0][1]

    @property
    def best(self) -> tuple[int, PredictedLoad]:
        """Draft tokens and load of the shortest request; of saturated servers that with the largest throughput."""

        def order(item: tuple[int, PredictedLoad]) -> tuple[bool, float, int]:
            num, load = item
            return load.is_saturated, -load.requests_per_s if load.is_saturated else load.e2el_s, num

        return min(self.loads, key=order)


def load_with_drafts(
    speculation: Speculation, rate_per_s: float, size: RequestSize, limits: ServerLimits
) -> RateLoad:
    """The load of each draft length at one rate. Raises UsageError for a rate that is not above 0."""
    at_size = speculation.at_context(size.mean_context)
    return RateLoad(
        rate_per_s=rate_per_s,
        loads=tuple(
            (num, load_at_rate(rate_per_s, size, seconds_per_token(at_size, num), limits))
            for num in (0, *speculation.draft_tokens)
        ),
    )


def seconds_per_token(speculation: Speculation, num_draft_tokens: int) -> StepSeconds:
    """Time in which a step of such work yields one token to each of its rows, with the prompts that it adds."""
    target_s, draft_s = speculation.steps.target_s, speculation.steps.draft_s
    if not num_draft_tokens:
        return target_s

    def token_s(work: StepWork) -> float:
        rows = float(work.num_decodes)
        decode_s = speculation.step(rows, num_draft_tokens).total_s if rows else 0.0
        prompts_s = 0.0
        if work.num_prefills:
            verified = one_step(
                num_decodes=rows, context=speculation.steps.context, row_tokens=num_draft_tokens + 1
            )
            together = _with_prompts_of(work, verified)
            prompts = _with_prompts_of(work, one_step(num_decodes=0.0, context=0.0))
            prompts_s = target_s(together) - (target_s(verified) if rows else 0.0) + draft_s(prompts)
        return decode_s / speculation.tokens(num_draft_tokens) + prompts_s

    return token_s


def _with_prompts_of(work: StepWork, rows: StepWork) -> StepWork:
    """The step of ``rows`` with the prompts of ``work``, each of which ends in it."""
    return replace(
        rows,
        num_prefills=work.num_prefills,
        prefill_tokens=work.prefill_tokens,
        prefill_context=work.prefill_context,
        prefill_positions=work.prefill_positions,
        num_sampled=rows.num_sampled + work.num_prefills,
    )
