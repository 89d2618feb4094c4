"""Linear maps of a value model, as they are stored or with weights of eight bits.

A quantised weight has one scale for each output channel, a power of two: what it stands for is exact in bfloat16.
So all products below multiply the same weights, and differ in what they do to their input alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from benchctl.guided.operations import FUSED, LARGEST_FLOAT8, PLAIN

FLOAT8: Final = torch.float8_e4m3fn
_LEAST_EXPONENT: Final = -126
"""Of a normal float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear map of weights [N, K] and a bias [N]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLinear:
    """A linear map of weights [N, K] in float8_e4m3fn, to be multiplied by ``scales`` [N, 1] in float32."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    product: "Product"

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight, self.scales] if self.bias is None else [self.weight, self.scales, self.bias]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights [N, K] that these stand for; exact in bfloat16 and wider."""
        return self.weight.to(dtype) * self.scales.to(dtype)


Product = Callable[[Tensor, QuantizedLinear], Tensor]
"""How inputs [T, K] are multiplied: [T, N], bias included, in the type of the input."""


def quantized(linear: Linear, product: Product) -> QuantizedLinear:
    """The map with its weights rounded to float8."""
    weight, scales = quantize_channels(linear.weight)
    return QuantizedLinear(weight=weight, scales=scales, bias=linear.bias, product=product)


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` [N, K] in float8_e4m3fn, and scales [N, 1]: powers of two that bring no number beyond its range.

    Numbers of 2^-6 of a scale and more are off by 1/16 of themselves at most, smaller ones by 2^-10 of the scale.
    """
    largest = weight.abs().amax(dim=1, keepdim=True).float()
    # frexp gives a mantissa below 1, so that the next power of two is never too small.
    exponents = torch.frexp(largest / LARGEST_FLOAT8).exponent.clamp_min(_LEAST_EXPONENT)
    scales = torch.ldexp(torch.ones_like(largest), exponents)
    return (weight.float() / scales).to(FLOAT8), scales


def weights_alone(x: Tensor, linear: QuantizedLinear) -> Tensor:
    """The input as it is: for devices that cannot multiply float8."""
    return functional.linear(x, linear.dequantized(x.dtype), linear.bias)


def scaled_rows(x: Tensor, linear: QuantizedLinear) -> Tensor:
    """Each row of the input quantised as well, and products that know the scales of rows and channels."""
    rows, row_scales = FUSED.quantize_rows(x)
    # A bias is refused beside a result in float32.
    bias = None if x.dtype == torch.float32 else linear.bias
    result = torch._scaled_mm(  # noqa: SLF001 - the public name is newer than the oldest torch that has the product
        rows, linear.weight.t(), scale_a=row_scales, scale_b=linear.scales.t(), bias=bias, out_dtype=x.dtype
    )
    return result if bias is linear.bias else result + linear.bias


def scaled_after(x: Tensor, linear: QuantizedLinear) -> Tensor:
    """The same where products know one scale for all: they give float32, which is scaled afterwards."""
    rows, row_scales = FUSED.quantize_rows(x)
    one = torch.ones((), device=x.device)
    result = torch._scaled_mm(rows, linear.weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)  # noqa: SLF001
    result = result * row_scales * linear.scales.t()
    return (result if linear.bias is None else result + linear.bias).to(x.dtype)


def emulated(x: Tensor, linear: QuantizedLinear) -> Tensor:
    """The same in float32, on any device: what the products are held against."""
    rows, row_scales = PLAIN.quantize_rows(x)
    bias = None if linear.bias is None else linear.bias.float()
    product = functional.linear(rows.float() * row_scales, linear.dequantized(torch.float32), bias)
    return product.to(x.dtype)
