"""Sources of step times for a prediction before any measurement."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchctl.costs.roofline import forward_bytes, forward_flops, roofline_ns
from benchctl.steptime.queueing import kv_capacity_tokens
from benchctl.steptime.serving_times import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    ServerLimits,
    StepSeconds,
)
from benchctl.steptime.work import Deployment, StepWork
from benchctl.units import NS_PER_S, US_PER_S

if TYPE_CHECKING:
    from benchctl.steptime.model import StepTimeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeSource:
    """The duration of a step, and its origin in words; ``is_bound`` for times that no server can undercut."""

    step_s: StepSeconds
    words: str
    limits: ServerLimits
    is_bound: bool = False


def roofline_source(
    deployment: Deployment,
    *,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
) -> StepTimeSource:
    """The larger of compute and memory traffic at the data sheet's peaks: real steps take longer."""
    shape, hardware, devices = deployment.shape, deployment.hardware, deployment.tensor_parallel

    def step_s(work: StepWork) -> float:
        flops = forward_flops(
            shape,
            float(work.tokens),
            float(work.prefill_positions),
            float(work.num_sampled),
            decode_positions=float(work.decode_positions),
        )
        num_bytes = forward_bytes(shape, float(work.context + work.tokens), float(work.tokens))
        return roofline_ns(flops, num_bytes, hardware, shape.precision) / NS_PER_S / devices

    words = f"roofline of {_words(deployment)}"
    limits = _limits(deployment, max_num_seqs, max_num_batched_tokens)
    return StepTimeSource(step_s=step_s, words=words, limits=limits, is_bound=True)


def fitted_source(
    model: "StepTimeModel",
    deployment: Deployment,
    *,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
) -> StepTimeSource:
    """A fitted model; raises UsageError for a device or a tensor-parallel size that it was not fitted to."""
    model.check_deployment(deployment)

    def step_s(work: StepWork) -> float:
        return float(model.extrapolate_us(work, deployment)) / US_PER_S

    limits = _limits(deployment, max_num_seqs, max_num_batched_tokens)
    return StepTimeSource(step_s=step_s, words=f"step-time model of {_words(deployment)}", limits=limits)


def _words(deployment: Deployment) -> str:
    devices = f"{deployment.tensor_parallel} x " if deployment.tensor_parallel > 1 else ""
    return f"{deployment.shape.name} on {devices}{deployment.hardware.name}"


def _limits(deployment: Deployment, max_num_seqs: int, max_num_batched_tokens: int) -> ServerLimits:
    has_memory = deployment.hardware.memory_bytes is not None
    return ServerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_tokens=kv_capacity_tokens(deployment) if has_memory else None,
    )
