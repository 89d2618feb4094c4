"""Lengths and values: a value is the discounted share of what is still to come, v = 1 - gamma^length.

0 means the answer ends here; the longer the rest, the closer to 1. The mean of values is not the value of the mean
length.
"""

import math
from typing import overload

import torch
from torch import Tensor

from benchctl.guided.errors import GuidanceError


@overload
def value_of_length(length: float, gamma: float) -> float: ...
@overload
def value_of_length(length: Tensor, gamma: float | Tensor) -> Tensor: ...
def value_of_length(length: float | Tensor, gamma: float | Tensor) -> float | Tensor:
    """v = 1 - gamma^length, for a length in tokens.

    Numbers out of range raise GuidanceError; tensors are not looked at, because that would wait for the device.
    """
    if isinstance(length, Tensor):
        return -torch.expm1(length * _log(gamma))
    if not length >= 0:
        raise GuidanceError(f"length is {length}; it is a number of tokens and must be 0 or more")
    return -math.expm1(length * _log_of_number(gamma))


@overload
def length_of_value(value: float, gamma: float) -> float: ...
@overload
def length_of_value(value: Tensor, gamma: float | Tensor) -> Tensor: ...
def length_of_value(value: float | Tensor, gamma: float | Tensor) -> float | Tensor:
    """Length in tokens = ln(1 - v) / ln(gamma); infinite at 1.

    Numbers out of range raise GuidanceError; tensors are not looked at, because that would wait for the device.
    """
    if isinstance(value, Tensor):
        return torch.log1p(-value) / _log(gamma)
    if not 0 <= value <= 1:
        raise GuidanceError(f"value is {value}; it must lie between 0 (ends now) and 1 (never ends)")
    return math.inf if value == 1 else math.log1p(-value) / _log_of_number(gamma)


def _log(gamma: float | Tensor) -> float | Tensor:
    return torch.log(gamma) if isinstance(gamma, Tensor) else math.log(gamma)


def _log_of_number(gamma: float | Tensor) -> float:
    number = float(gamma)
    if not 0 < number < 1:
        raise GuidanceError(f"gamma is {number}; it must lie strictly between 0 and 1, such as 0.997")
    return math.log(number)
