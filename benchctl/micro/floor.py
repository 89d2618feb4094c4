"""The least time of a forward pass by its FLOPs and bytes: a shorter one was not that pass.

Bytes are those of the weights, read once, and of the key-value cache that the pass reads and writes. They count
only where they do not fit into the device's last cache: replays of a smaller model find it there.

Data sheets state peaks that no pass exceeds. Measured peaks are what some kernels reached at some time, which
another kernel may beat by a little; of their floor ``MEASURED_SHARE`` counts.
"""

from dataclasses import dataclass
from typing import Final

from benchctl.costs.hardware import Hardware
from benchctl.costs.model_shape import ModelShape
from benchctl.costs.roofline import forward_flops, roofline_ns, weight_read_bytes
from benchctl.profile.choices import DataType, ForwardPoint

MEASURED_SHARE: Final = 0.7
"""Measured peaks vary from day to day, on a virtual machine by a quarter."""
_ELEMENT_BYTES: Final[dict[DataType, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The device that passes are held against, and its last cache."""

    hardware: Hardware
    cache_bytes: int = 0
    """0 where it is unknown: every pass then reads from memory."""
    is_measured: bool = False
    """The peaks were reached by kernels, and are not those of a data sheet."""

    def floor_ns(self, shape: ModelShape, point: ForwardPoint, dtype: DataType) -> int:
        """Nanoseconds in which no such pass ends."""
        num_bytes = pass_bytes(shape, point, dtype)
        if num_bytes <= self.cache_bytes:
            num_bytes = 0
        least_ns = roofline_ns(pass_flops(shape, point), num_bytes, self.hardware)
        return round(least_ns * MEASURED_SHARE) if self.is_measured else least_ns


def pass_bytes(shape: ModelShape, point: ForwardPoint, dtype: DataType) -> int:
    """Weights of all projections and the head once, and keys and values of all tokens in the cache."""
    element_bytes = _ELEMENT_BYTES[dtype]
    tokens = point.batch_size * (point.context_tokens + point.new_tokens)
    return weight_read_bytes(shape, element_bytes) + tokens * shape.kv_bytes_per_token(element_bytes)


def pass_flops(shape: ModelShape, point: ForwardPoint) -> float:
    """Two for each weight and token, attention over all that a token sees, and the head at one token a sequence."""
    new, context = point.new_tokens, point.context_tokens
    positions = point.batch_size * (new * context + new * (new + 1) // 2)
    is_decode = point.phase == "decode"
    return forward_flops(
        shape,
        float(point.total_new_tokens),
        0.0 if is_decode else float(positions),
        float(point.batch_size),
        decode_positions=float(positions) if is_decode else 0.0,
    )
