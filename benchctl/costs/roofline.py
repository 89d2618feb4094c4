"""FLOPs and bytes of one forward pass, and the least time that a device needs for them.

F = linear T + attention P + head R   (T tokens forwarded, P positions that they see together, R rows with a head)
M = weights + kv K                    (weights are read once, K tokens of key-value cache are read or written)
time >= max(F / peak, M / bandwidth)

A bound and never a measurement: no host, no launches, no norms, and all of the data sheet's peaks. Weights have the
bytes of their format, elements of the cache two. Of experts, those are read that T tokens choose, if each choice is
independent and equally likely (``costs/experts.py``).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from benchctl.costs.experts import at_least
from benchctl.costs.hardware import Hardware
from benchctl.costs.model_shape import ModelShape
from benchctl.costs.precision import Precision
from benchctl.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Quantity = TypeVar("Quantity", float, "NDArray[np.float64]")
"""One pass, or many at once."""


def forward_flops(
    shape: ModelShape, tokens: Quantity, positions: Quantity, heads: Quantity, *, decode_positions: Quantity
) -> Quantity:
    """FLOPs of passes that forward so many tokens; the head is the one that the shape has.

    ``decode_positions`` are those of decoding tokens, ``positions`` all others'.
    """
    attention = positions * shape.attention_flops_per_position()
    attention = attention + decode_positions * shape.decode_attention_flops_per_position()
    return tokens * shape.linear_flops_per_token() + attention + heads * shape.head_flops()


def forward_bytes(shape: ModelShape, kv_tokens: Quantity, tokens: Quantity) -> Quantity:
    """Bytes of passes that forward so many tokens: weights once, and ``kv_tokens`` of key-value cache."""
    read = kv_tokens * shape.kv_bytes_per_token() + weight_read_bytes(shape)
    if shape.moe is None:
        return read
    return read + shape.moe.uniform_experts(tokens) * (shape.expert_params() * shape.param_bytes())


def weight_read_bytes(shape: ModelShape, bytes_per_param: float | None = None) -> int:
    """Weights read once by any pass, whatever its batch: projections without routed experts, and the head.

    The embedding is a gather of a few rows and is not counted, unless it is tied and thus read as the head.
    ``bytes_per_param`` replaces the format of the projections and the 2 bytes of the head.
    """
    head_bytes = 2 if bytes_per_param is None else bytes_per_param
    param_bytes = shape.param_bytes() if bytes_per_param is None else bytes_per_param
    return round(shape.static_params() * param_bytes + shape.head_flops() // 2 * head_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime(Generic[Quantity]):
    """Least time of one forward pass, or of each of many, in seconds.

    ``weights_s`` and ``prefixes_s`` are the times to move weights and key-value cache at the device's bandwidth,
    ``compute_s`` is that of all FLOPs at its peak.
    """

    weights_s: Quantity
    prefixes_s: Quantity
    compute_s: Quantity

    @property
    def excess_compute_s(self) -> Quantity:
        """Time of the FLOPs beyond that of the bytes; 0 where the pass is bound by memory."""
        return at_least(self.compute_s - self.weights_s - self.prefixes_s, 0.0)

    @property
    def floor_s(self) -> Quantity:
        """The larger of both: max(weights + prefixes, compute)."""
        return self.weights_s + self.prefixes_s + self.excess_compute_s


def pass_time(
    shape: ModelShape,
    hardware: Hardware,
    *,
    tokens: Quantity,
    kv_tokens: Quantity,
    positions: Quantity,
    decode_positions: Quantity,
    heads: Quantity,
) -> PassTime[Quantity]:
    """The least time of passes with these counts, at the peaks of ``hardware``."""
    prefix_bytes = kv_tokens * shape.kv_bytes_per_token()
    flops = forward_flops(shape, tokens, positions, heads, decode_positions=decode_positions)
    bandwidth = hardware.bandwidth_bytes_per_s
    return PassTime(
        weights_s=(forward_bytes(shape, kv_tokens, tokens) - prefix_bytes) / bandwidth,
        prefixes_s=prefix_bytes / bandwidth,
        compute_s=flops / hardware.peak_of(shape.precision),
    )


def roofline_ns(flops: float, num_bytes: float, hardware: Hardware, precision: Precision = "bfloat16") -> int:
    """max(flops / peak, bytes / bandwidth), in nanoseconds."""
    return round(max(flops / hardware.peak_of(precision), num_bytes / hardware.bandwidth_bytes_per_s) * NS_PER_S)
