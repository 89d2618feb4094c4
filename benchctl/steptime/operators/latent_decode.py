"""Work of a decoding latent attention, absorbed: B rows of H heads against S cached vectors each.

    cache    B S (r + R) bytes / bandwidth
    compute  B H' S 2 (2 r + R) / peak,  H' = heads rounded up to the 16 rows of a tensor-core tile
    io       B H (2 r + R) elements of queries and outputs
    context  S, positions that are walked one after the other where there are too few rows to share
    kernels  1

The measured module runs eagerly, so that the host's launches are its least time: about 160 us on H100 with vLLM
0.14.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from benchctl.costs.hardware import Hardware
from benchctl.costs.model_shape import LatentShape
from benchctl.steptime.design import Floats
from benchctl.steptime.peaks import US_PER_S

COLUMNS: Final = ("kernels", "cache", "compute", "io", "context")
_TILE_HEADS: Final = 16
_ACTIVATION_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentDecode:
    """Calls of one device, one value for each: rows, heads, and cached tokens of each row."""

    rows: Floats
    heads: Floats
    context: Floats


def latent_decode_columns(
    calls: LatentDecode, latent: LatentShape, hardware: Hardware, *, cache_bytes: float = 2.0
) -> Floats:
    """Columns (calls, ``COLUMNS``) in microseconds, positions and a count of kernels."""
    byte_us = US_PER_S / hardware.bandwidth_bytes_per_s
    cached = calls.rows * calls.context
    heads = np.ceil(calls.heads / _TILE_HEADS) * _TILE_HEADS
    per_position = latent.absorbed_flops(1)
    parts = (
        np.ones_like(cached),
        cached * latent.cache_elements() * cache_bytes * byte_us,
        cached * heads * per_position / hardware.peak_flops_per_s * US_PER_S,
        calls.rows * calls.heads * per_position / 2 * _ACTIVATION_BYTES * byte_us,
        calls.context,
    )
    return np.stack(parts, axis=1)
