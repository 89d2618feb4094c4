"""Bytes that one step moves between device memory and compute units; what a roofline divides by bandwidth."""

from benchctl.costs.shapes import ModelShape


def weight_read_bytes(shape: ModelShape, bytes_per_param: float = 2) -> int:
    """Weights read once by any step, whatever its batch: projections and head.

    The embedding is a gather of a few rows and is not counted, unless it is tied and thus read as the head.
    """
    return round((shape.linear_flops_per_token() + shape.head_flops()) // 2 * bytes_per_param)


def kv_bytes(shape: ModelShape, num_tokens: float, bytes_per_element: float = 2) -> float:
    """Key-value cache of so many tokens, summed over the sequences of the batch: read or written once."""
    return shape.kv_bytes_per_token(bytes_per_element) * num_tokens
