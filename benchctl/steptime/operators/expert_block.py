"""Work of a fused block of experts on one device, with n tokens, k choices each, and width w = d_e / TP.

    weights   experts reached times 3 d w bytes / bandwidth
    tuned     choices in whole blocks times 6 d w FLOPs / peak, where the engine has a tuned kernel for this width,
    untuned   else this
    rows      n k (d + 2 w) bytes / bandwidth: each choice is gathered, and written even if its expert is elsewhere
    experts   N, which the alignment of tokens to experts walks over
    kernels   1

A width without a tuned kernel costs about three times the compute: vLLM has files of settings by experts and width
for each device, and defaults for all others.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from benchctl.costs.hardware import Hardware
from benchctl.steptime.design import Floats
from benchctl.steptime.operators.routing import ExpertLoad, power_law_load
from benchctl.steptime.peaks import US_PER_S

COLUMNS: Final = ("kernels", "weights", "tuned", "untuned", "rows", "experts")
_TUNED_OF_EIGHT: Final = ((8, 1792), (8, 2048), (8, 3584), (8, 4096), (8, 7168))
TUNED: Final[dict[str, frozenset[tuple[int, int]]]] = {
    "h100-sxm": frozenset({*_TUNED_OF_EIGHT, (128, 192), (128, 928), (128, 1856), (256, 512)}),
    "a100-sxm": frozenset({*_TUNED_OF_EIGHT, (128, 192)}),
}
"""Experts on a device and their width, with tuned bfloat16 kernels in vLLM 0.14. Source: its folder
``fused_moe/configs``, as far as measured times confirm it."""
_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertBlock:
    """Calls, one value for each. ``tensor_parallel`` devices divide each expert, ``expert_parallel`` the set."""

    tokens: npt.NDArray[np.int64]
    hidden: Floats
    expert_ffn: Floats
    experts: npt.NDArray[np.int64]
    experts_per_token: npt.NDArray[np.int64]
    tensor_parallel: npt.NDArray[np.int64]
    expert_parallel: npt.NDArray[np.int64]
    alpha: Floats
    """Exponent of the power law that the routing follows."""


def expert_block_columns(block: ExpertBlock, hardware: Hardware) -> Floats:
    """Columns (calls, ``COLUMNS``) in microseconds and counts. Weights are bfloat16."""
    flop_us = US_PER_S / hardware.peak_flops_per_s
    byte_us = _BYTES * US_PER_S / hardware.bandwidth_bytes_per_s
    width = block.expert_ffn / block.tensor_parallel
    loads = _loads(block)
    expert_params = 3 * block.hidden * width
    padded_choices = np.array([load.padded_choices for load in loads])
    compute_us = padded_choices * 2 * expert_params * flop_us
    is_tuned = _is_tuned(block, width, hardware)
    parts = (
        np.ones_like(width),
        np.array([load.experts for load in loads]) * expert_params * byte_us,
        compute_us * is_tuned,
        compute_us * ~is_tuned,
        block.tokens * block.experts_per_token * (block.hidden + 2 * width) * byte_us,
        block.experts.astype(np.float64),
    )
    return np.stack(parts, axis=1)


def _loads(block: ExpertBlock) -> list[ExpertLoad]:
    @cache
    def load(tokens: int, experts: int, per_token: int, devices: int, alpha: float) -> ExpertLoad:
        return power_law_load(tokens, experts, per_token, alpha=alpha, devices=devices)

    columns = (block.tokens, block.experts, block.experts_per_token, block.expert_parallel, block.alpha)
    return [load(*call) for call in zip(*(column.tolist() for column in columns), strict=True)]


def _is_tuned(block: ExpertBlock, width: Floats, hardware: Hardware) -> npt.NDArray[np.bool_]:
    tuned = TUNED.get(hardware.device, frozenset())
    experts = block.experts // block.expert_parallel
    return np.array([call in tuned for call in zip(experts.tolist(), width.tolist(), strict=True)])
