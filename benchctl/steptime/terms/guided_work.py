"""The forward pass of a value model in a guided step, at its roofline.

Its tokens are the prompts that it prefills, the tokens that it extends its prefixes by, and the candidates, each
with a value head. It reads its weights once and the cache of the guided rows, whose contexts are taken as long as
the mean row's. It runs on one device.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from benchctl.steptime.terms.elementwise import greater, is_above
from benchctl.steptime.terms.peak_times import peak_times
from benchctl.steptime.work import Deployment, StepWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchctl.steptime.work import Quantity

    PricedWork: TypeAlias = Callable[[StepWork], Quantity]


def value_model_us(deployment: Deployment) -> "PricedWork | None":
    """max(FLOPs at peak, bytes at peak) of the value model's pass in microseconds; None without a value model."""
    if deployment.value_shape is None:
        return None
    value_model = deployment.value_shape.as_value_model()
    times = peak_times(replace(deployment, shape=value_model, tensor_parallel=1, weight_bytes_per_param=None))

    def price(work: StepWork) -> "Quantity":
        tokens = work.value_prefill_tokens + work.value_extend_tokens + work.candidates
        rows = work.num_prefills + work.num_decodes
        mean_context = (work.prefill_context + work.decode_context) / greater(rows, 1.0)
        compute = (
            tokens * times.token_us
            + work.value_prefill_tokens * mean_context / 2 * times.prefill_position_us
            + (work.value_extend_tokens + work.candidates) * mean_context * times.decode_position_us
            + work.candidates * times.head_us
        )
        memory = (work.guided_rows * mean_context + tokens) * times.kv_token_us
        memory = memory + is_above(tokens, 0.0) * (times.static_weights_us + times.head_weights_us)
        return greater(compute, memory)

    return price
