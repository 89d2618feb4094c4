"""FLOPs and bytes of one forward pass, and the least time that a device needs for them.

F = linear T + attention P + head R   (T tokens forwarded, P positions that they see together, R rows with a head)
M = weights + kv K                    (weights are read once, K tokens of key-value cache are read or written)
time >= max(F / peak, M / bandwidth)

A bound and never a measurement: no host, no launches, no norms, and all of the data sheet's peaks. Two bytes for
each weight and each element of the cache.
"""

from typing import TYPE_CHECKING, TypeVar

from benchctl.costs.hardware import Hardware
from benchctl.costs.shapes import ModelShape
from benchctl.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Quantity = TypeVar("Quantity", float, "NDArray[np.float64]")
"""One pass, or many at once."""


def forward_flops(shape: ModelShape, tokens: Quantity, positions: Quantity, heads: Quantity) -> Quantity:
    """FLOPs of passes that forward so many tokens; the head is the one that the shape has."""
    linear = tokens * shape.linear_flops_per_token()
    return linear + positions * shape.attention_flops_per_position() + heads * shape.head_flops()


def forward_bytes(shape: ModelShape, kv_tokens: Quantity) -> Quantity:
    """Bytes of passes: all weights once, and so many tokens of key-value cache."""
    return kv_tokens * shape.kv_bytes_per_token() + weight_read_bytes(shape)


def weight_read_bytes(shape: ModelShape, bytes_per_param: float = 2) -> int:
    """Weights read once by any pass, whatever its batch: projections and head.

    The embedding is a gather of a few rows and is not counted, unless it is tied and thus read as the head.
    """
    return round((shape.linear_flops_per_token() + shape.head_flops()) // 2 * bytes_per_param)


def roofline_ns(flops: float, num_bytes: float, hardware: Hardware) -> int:
    """max(flops / peak, bytes / bandwidth), in nanoseconds."""
    return round(max(flops / hardware.peak_flops_per_s, num_bytes / hardware.bandwidth_bytes_per_s) * NS_PER_S)
