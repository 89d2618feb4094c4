"""The products of float8 that a device computes, found out before a server answers its first request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from benchctl.guided.value_model.linear import (
    Linear,
    Product,
    emulated,
    quantized,
    scaled_after,
    scaled_rows,
    weights_alone,
)

if TYPE_CHECKING:
    from benchctl.guided.value_model.value_model import ValueModelConfig

_CAPABILITY: Final = (8, 9)
"""Of the first GPUs that multiply float8."""
_TOLERANCE: Final = 2e-2
"""Largest difference from the same product in float32, of its largest result: bfloat16 rounds it to 1/256."""
_TOKENS: Final = (1, 40)
_PRODUCTS: Final[Mapping[str, Product]] = {"scaled_rows": scaled_rows, "scaled_after": scaled_after}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenProduct:
    """The way in which the linear maps of a quantised value model are computed."""

    name: str
    """That of the function in ``linear``."""
    product: Product
    reason: str | None = None
    """Why only the weights are quantised, where that is so."""


def has_float8(device: torch.device) -> bool:
    """True for a GPU that multiplies float8."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= _CAPABILITY)


def choose_product(config: "ValueModelConfig", device: torch.device, dtype: torch.dtype) -> ChosenProduct:
    """Float8 for weights, and for inputs where the device multiplies models of these dimensions right."""
    if not has_float8(device):
        return _weights_alone(
            f"products of float8 need a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}"
        )
    return first_right_product(_PRODUCTS, config, device, dtype)


def first_right_product(
    products: Mapping[str, Product], config: "ValueModelConfig", device: torch.device, dtype: torch.dtype
) -> ChosenProduct:
    """The first of these that gives what it must on this device."""
    faults = []
    for name, product in products.items():
        try:
            difference = largest_difference(product, config, device, dtype)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            faults.append(f"{name} fails ({' '.join(str(error).split())[:200]})")
            continue
        if difference <= _TOLERANCE:
            return ChosenProduct(name=name, product=product)
        faults.append(f"{name} differs by {difference:.3g} of its largest result, more than {_TOLERANCE}")
    return _weights_alone("; ".join(faults))


def _weights_alone(reason: str) -> ChosenProduct:
    return ChosenProduct(name="weights_alone", product=weights_alone, reason=reason)


@torch.no_grad()
def largest_difference(
    product: Product, config: "ValueModelConfig", device: torch.device, dtype: torch.dtype
) -> float:
    """From ``emulated``, over the four linear maps of a layer: the largest, as a share of the largest result."""
    generator = torch.Generator(device).manual_seed(0)
    query, heads = config.heads * config.head_dim, (config.heads + 2 * config.kv_heads) * config.head_dim
    shapes = (
        (heads, config.hidden),
        (config.hidden, query),
        (2 * config.ffn, config.hidden),
        (config.hidden, config.ffn),
    )
    worst = 0.0
    for outputs, inputs in shapes:
        weight, bias = (
            torch.randn(size, generator=generator, device=device).to(dtype)
            for size in ((outputs, inputs), (outputs,))
        )
        linear = quantized(Linear(weight=weight, bias=bias), product)
        for tokens in _TOKENS:
            x = torch.randn((tokens, inputs), generator=generator, device=device).to(dtype)
            expected = emulated(x, linear).double()
            difference = float((linear(x).double() - expected).abs().max() / expected.abs().max())
            # What is not a number counts as worst.
            worst = max(worst, difference if difference == difference else float("inf"))  # noqa: PLR0124
    return worst
