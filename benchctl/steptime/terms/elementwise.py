"""Comparisons that hold for one number and for arrays alike, element by element."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from benchctl.steptime.work import Quantity


def greater(a: "Quantity", b: "Quantity") -> "Quantity":
    """The larger of two quantities."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)


def is_above(a: "Quantity", b: "Quantity") -> "Quantity":
    """1 where the first quantity is larger than the second, else 0."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.greater(a, b).astype(np.float64)
    return 1.0 if a > b else 0.0
