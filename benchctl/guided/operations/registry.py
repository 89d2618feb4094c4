"""The operations by name: ``PLAIN`` is torch, ``FUSED`` is what torch's dispatcher has for the device.

Without kernels both compute the same in the same way. ``register_kernels`` lets CUDA compute ``FUSED`` by those of
``kernels``; ``PLAIN`` never does.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor

from benchctl.guided.operations.layers import (
    add_norm,
    gated,
    keep_drawn,
    quantize_rows,
    tree_attention,
    turn_and_store,
)
from benchctl.guided.operations.sampling import (
    filter_candidates,
    tilt_candidates,
    vocabulary_mass,
    write_candidates,
)

_SCHEMAS: Final = {
    "add_norm": "(Tensor(a!) x, Tensor? delta, Tensor weight, float epsilon) -> Tensor",
    "turn_and_store": (
        "(Tensor qkv, Tensor rotations, Tensor positions, Tensor cells, Tensor(a!) cache, Tensor? norm, "
        "float epsilon) -> Tensor"
    ),
    "tree_attention": (
        "(Tensor query, Tensor cache, Tensor starts, Tensor missing, Tensor counts, Tensor slots, Tensor cached, "
        "Tensor flat_columns, int cells_per_slot, int columns, int span) -> Tensor"
    ),
    "gated": "(Tensor gate_up) -> Tensor",
    "keep_drawn": (
        "(Tensor(a!) cells, Tensor ids, Tensor(b!) unknown, Tensor slots, Tensor cached, Tensor drawn, "
        "int cells_per_slot) -> ()"
    ),
    "quantize_rows": "(Tensor x) -> (Tensor, Tensor)",
    "vocabulary_mass": "(Tensor scores, Tensor top, Tensor limits) -> Tensor",
    "filter_candidates": "(Tensor top, Tensor? mass, Tensor limits) -> (Tensor, Tensor, Tensor)",
    "tilt_candidates": (
        "(Tensor probs, Tensor mask, Tensor counts, Tensor ids, Tensor raw, Tensor lines, Tensor ends, "
        "Tensor modes, int rules) -> Tensor"
    ),
    "write_candidates": (
        "(Tensor(a!) logits, Tensor index, Tensor ids, Tensor log_probs, Tensor counts, Tensor limits) -> ()"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The operations that guidance is computed with; see the functions of these names."""

    add_norm: Callable[..., Tensor]
    turn_and_store: Callable[..., Tensor]
    tree_attention: Callable[..., Tensor]
    gated: Callable[..., Tensor]
    keep_drawn: Callable[..., None]
    quantize_rows: Callable[..., tuple[Tensor, Tensor]]
    vocabulary_mass: Callable[..., Tensor]
    filter_candidates: Callable[..., tuple[Tensor, Tensor, Tensor]]
    tilt_candidates: Callable[..., Tensor]
    write_candidates: Callable[..., None]
    splits_keys: bool = False
    """``tree_attention`` looks at as many cells as there are; if false, at ``span`` cells of every row."""


NAMES: Final = tuple(each.name for each in fields(Operations) if each.name != "splits_keys")
PLAIN: Final = Operations(
    add_norm=add_norm,
    turn_and_store=turn_and_store,
    tree_attention=tree_attention,
    gated=gated,
    keep_drawn=keep_drawn,
    quantize_rows=quantize_rows,
    vocabulary_mass=vocabulary_mass,
    filter_candidates=filter_candidates,
    tilt_candidates=tilt_candidates,
    write_candidates=write_candidates,
)


def _registered() -> tuple[torch.library.Library, Operations]:
    library = torch.library.Library("benchctl", "DEF")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, getattr(PLAIN, name), "CompositeExplicitAutograd")
    return library, Operations(**{name: getattr(torch.ops.benchctl, name).default for name in NAMES})


_LIBRARY, FUSED = _registered()


def kernel_operations() -> Operations:
    """The kernels themselves. ImportError where there is no Triton."""
    parts: list[Any] = [
        importlib.import_module(f"benchctl.guided.kernels.{part}") for part in ("attention", "layers", "sampling")
    ]
    kernels = {name: next(getattr(part, name) for part in parts if hasattr(part, name)) for name in NAMES}
    guarded: dict[str, Any] = {name: _on_its_device(kernel) for name, kernel in kernels.items()}
    return Operations(**guarded)


def _on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, whichever its tensors are on."""

    @functools.wraps(kernel)
    def launch(first: Tensor, *others: Any) -> Any:
        with torch.cuda.device_of(first):
            return kernel(first, *others)

    return launch


def register_kernels(kernels: Operations) -> None:
    """Let CUDA compute ``FUSED`` by these from now on; to be called once."""
    for name in NAMES:
        _LIBRARY.impl(name, getattr(kernels, name), "CUDA")
