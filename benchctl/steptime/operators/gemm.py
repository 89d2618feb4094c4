"""Work of a matrix product: m tokens times weights of k by n.

    compute  2 m' n k / peak,  m' = m rounded up to tiles of 128 rows, if that takes longer than
    memory   (n k + m k + m n) bytes / bandwidth, else this; and one kernel

Tiles explain most of what a roofline misses between 64 and 512 tokens: 130 tokens cost as much as 256.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from benchctl.costs.hardware import Hardware
from benchctl.steptime.design import Floats
from benchctl.steptime.peaks import US_PER_S

COLUMNS: Final = ("compute", "memory", "kernels")
_TILE_ROWS: Final = 128
_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gemm:
    """Products of one device, one value for each: m tokens, n outputs, k inputs, in bfloat16."""

    m: Floats
    n: Floats
    k: Floats


def gemm_columns(gemm: Gemm, hardware: Hardware) -> Floats:
    """Columns (products, ``COLUMNS``) in microseconds and a count of kernels."""
    rows = np.ceil(gemm.m / _TILE_ROWS) * _TILE_ROWS
    compute_us = 2 * rows * gemm.n * gemm.k / hardware.peak_flops_per_s * US_PER_S
    elements = gemm.n * gemm.k + gemm.m * gemm.k + gemm.m * gemm.n
    memory_us = _BYTES * elements / hardware.bandwidth_bytes_per_s * US_PER_S
    is_compute_bound = compute_us > memory_us
    parts = (is_compute_bound * compute_us, ~is_compute_bound * memory_us, np.ones_like(gemm.m))
    return np.stack(parts, axis=1)
