"""The exponential tilt with a given expectation: the slope m for which sum x p e^(m x) / sum p e^(m x) = target.

The expectation rises with m, so a bracket always holds the answer. All rows are solved at once, with a number of
operations that the shapes alone determine: nothing waits for the device, and no row waits for another.
"""

import math
from typing import Final

import torch
from torch import Tensor

LARGEST_T: Final = 22.5
"""Slopes are m = sinh(t). Targets lie 1e-6 or more within the range; then |m| <= 2e6 ln(2e6 / smallest p), which
is below sinh(22.5) for every p that float64 can hold."""
_SECTIONS: Final = 64
_LARGEST_GRID: Final = 1 << 24
"""Elements of a grid at most; with whole vocabularies as candidates there are fewer sections and more rounds."""
_BRACKET_WIDTH: Final = 2e-4
"""Of t when Newton takes over: close enough for each step to square the error."""
NEWTON_STEPS: Final = 4


def solve_slope(log_probs: Tensor, x: Tensor, target: Tensor) -> Tensor:
    """Slopes [B, 1] that bring the expectation of ``x`` to ``target``.

    ``log_probs`` [B, K], -inf where absent; ``x`` [B, K] from 0 to 1, both of them attained, 0 where absent;
    ``target`` [B, 1] in [1e-6, 1 - 1e-6]. Rows that break this get some finite slope. In float64 the expectation is
    met to 1e-9 and better.
    """
    sections = max(8, min(_SECTIONS, _LARGEST_GRID // max(1, log_probs.numel())))
    steps = torch.linspace(0, 1, sections + 1, dtype=x.dtype, device=x.device)
    low = torch.full_like(target, -LARGEST_T)
    width = 2 * LARGEST_T
    for _ in range(bracket_rounds(sections)):
        grid = low + width * steps
        below = _expectation(log_probs, x, torch.sinh(grid)) < target
        # The last point below the target; the ends of the first bracket count as below and above.
        index = below[:, 1:-1].sum(dim=1, keepdim=True)
        low = grid.gather(1, index)
        width /= sections
    least, most = torch.sinh(low), torch.sinh(low + width)
    slope = (least + most) / 2
    for _ in range(NEWTON_STEPS):
        slope = _newton(log_probs, x, target, slope).clamp(least, most)
    return slope


def bracket_rounds(sections: int) -> int:
    """The number of cuts of the bracket into ``sections`` parts before Newton's method takes over."""
    return math.ceil(math.log(2 * LARGEST_T / _BRACKET_WIDTH) / math.log(sections))


def _expectation(log_probs: Tensor, x: Tensor, slopes: Tensor) -> Tensor:
    """Expectation of x [B, G] under each of G slopes of a row."""
    weights = torch.softmax(log_probs[:, None, :] + slopes[:, :, None] * x[:, None, :], dim=2)
    return (weights * x[:, None, :]).sum(dim=2)


def _newton(log_probs: Tensor, x: Tensor, target: Tensor, slope: Tensor) -> Tensor:
    """One step; the derivative of the expectation is the variance."""
    weights = torch.softmax(log_probs + slope * x, dim=1)
    mean = (weights * x).sum(dim=1, keepdim=True)
    variance = (weights * (x - mean).square()).sum(dim=1, keepdim=True)
    return slope + (target - mean) / variance.clamp_min(torch.finfo(x.dtype).tiny)
