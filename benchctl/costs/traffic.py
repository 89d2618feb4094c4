"""Bytes that one step moves between device memory and compute units; what a roofline divides by bandwidth."""

from benchctl.costs.shapes import ModelShape


def weight_read_bytes(shape: ModelShape, bytes_per_param: float = 2) -> int:
    """Weights read once by any step, whatever its batch: projections and head.

    The embedding is a gather of a few rows and is not counted, unless it is tied and thus read as the head.
    """
    return round((shape.linear_flops_per_token() + shape.head_flops()) // 2 * bytes_per_param)


def kv_read_bytes(shape: ModelShape, context_tokens: int, bytes_per_element: float = 2) -> int:
    """Key-value cache read by a decode step; ``context_tokens`` is summed over the sequences of the batch."""
    return shape.kv_bytes_per_token(bytes_per_element) * context_tokens
