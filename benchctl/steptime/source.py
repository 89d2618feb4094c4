"""Sources of step times for a prediction before any measurement."""

from dataclasses import dataclass

from benchctl.costs.roofline import forward_bytes, forward_flops, roofline_ns
from benchctl.steptime.queueing import ServerLimits, StepSeconds, kv_capacity_tokens
from benchctl.steptime.work import Deployment, StepWork
from benchctl.units import NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeSource:
    """The duration of a step, and its origin in words; ``is_bound`` for times that no server can undercut."""

    step_s: StepSeconds
    words: str
    limits: ServerLimits
    is_bound: bool = False


def roofline_source(
    deployment: Deployment, *, max_num_seqs: int = 256, max_num_batched_tokens: int = 8192
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

    limits = ServerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_tokens=kv_capacity_tokens(deployment),
    )
    devices_words = f"{devices} x {hardware.name}" if devices > 1 else hardware.name
    words = f"roofline of {shape.name} on {devices_words}"
    return StepTimeSource(step_s=step_s, words=words, limits=limits, is_bound=True)
