"""The choice of operations: kernels only where they give what torch gives.

The check runs before a server answers its first request. A kernel that a device or a version of Triton computes
otherwise would not fail: it would give other values.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, TypeAlias

import torch
from torch import Tensor

from benchctl.guided.modes import mode_batch
from benchctl.guided.operations import FUSED, PLAIN, Operations, kernel_operations, register_kernels
from benchctl.guided.params import CONSTRAINTS, MODES, GuidanceParams
from benchctl.guided.rows import limit_numbers
from benchctl.guided.value_model.layout import (
    Layout,
    Memory,
    RowWork,
    Shape,
    Work,
    exact_shape,
    pack,
    padded_shape,
    unpack,
)
from benchctl.guided.value_model.value_model import ValueModelConfig

TOLERANCES: Final = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference from torch of numbers up to 1 in size; of larger ones, as a share of them."""
_EPSILON: Final = 1e-6
_CELLS: Final = 2048
_FEW_CELLS: Final = 448
"""Of a slot that one program of attention reads alone."""
_VOCABULARY: Final = 17_008
"""More than one part of ``vocabulary_mass``, the last of which is not full; a multiple of 16."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The operations, and why they are torch's own where kernels were wanted; None where nothing is amiss."""

    operations: Operations
    reason: str | None = None


def choose_operations(
    config: ValueModelConfig, device: torch.device, dtype: torch.dtype, *, kernels: bool
) -> Chosen:
    """Kernels where they are wanted, there, and right for models of these dimensions; elsewhere torch."""
    if not kernels:
        return Chosen(PLAIN)
    if device.type != "cuda":
        return Chosen(PLAIN, "kernels need a GPU")
    try:
        differences = largest_differences(kernel_operations(), config, device, dtype)
    except Exception as error:  # noqa: BLE001 - compilers fail in ways of their own, and torch computes the same
        return Chosen(PLAIN, f"kernels cannot run here ({type(error).__name__}: {error})")
    for name, difference in differences.items():
        limit = tolerance(name, dtype)
        if not difference <= limit:
            return Chosen(
                PLAIN, f"kernel {name} differs from torch by {difference:.3g} here, more than {limit:.3g}"
            )
    register_kernels()
    return Chosen(replace(FUSED, splits_keys=True))


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Largest difference allowed of an operation; those of sampling compute in float32, whatever the model does."""
    is_of_layers = name in ("add_norm", "turn_and_store", "tree_attention", "gated", "keep_drawn")
    return TOLERANCES[dtype if is_of_layers else torch.float32]


@torch.no_grad()
def largest_differences(
    operations: Operations, config: ValueModelConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """By operation, the largest difference between what it and torch make of the same drawn numbers.

    Of a number above 1 in size, as torch computes it, the difference counts as a share: the roundings of both grow
    with it, and the largest of thousands of drawn numbers is far above 1.
    """
    largest: dict[str, float] = {}
    ours, theirs = (_results(each, config, device, dtype) for each in (operations, PLAIN))
    for (name, our), (_, their) in zip(ours, theirs, strict=True):
        expected = their.double()
        difference = float(((our.double() - expected).abs() / expected.abs().clamp_min(1)).max())
        # What is not a number must not be lost in a comparison.
        largest[name] = max(largest.get(name, 0.0), math.inf if math.isnan(difference) else difference)
    return largest


_Draw: TypeAlias = Callable[..., Tensor]
"""Normal numbers of a shape, the same for each operation by the order in which they are drawn."""


def _drawing(device: torch.device, dtype: torch.dtype) -> _Draw:
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device=device).to(dtype)


def _results(
    operations: Operations, config: ValueModelConfig, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    draw = _drawing(device, dtype)
    yield from _layer_results(operations, config, draw, device)
    # Prefixes that grow by few tokens and by many, and slots of few cells, are computed in pieces of other sizes.
    for num_columns, cells in product((16, 64), (_CELLS, _FEW_CELLS)):
        tokens = list(range(max(1, num_columns * config.kv_heads // config.heads)))
        longest = RowWork(slot=1, cached=min(600, cells * 3 // 4), missing=tokens)
        work = Work([longest, RowWork(slot=0, cached=0, missing=tokens)], 0)
        memory, shape = Memory(slots=3, cells=cells), exact_shape(work)
        query = draw(work.num_tokens, config.heads, config.head_dim)
        keys_values = draw(memory.slots * cells, 2, config.kv_heads, config.head_dim)
        layout = _layout(work, shape, memory, device)
        yield "tree_attention", _attended(operations, query, keys_values, layout, memory, shape)
    # Kernels are compiled for vocabularies that 16 divides, and for others.
    vocabulary = _VOCABULARY + (config.vocab % 16 > 0)
    for width, every in zip((7, 20), (1, 3), strict=True):
        draw = _drawing(device, torch.float32)
        yield from _sampling_results(operations, draw, device, vocabulary, width, _parameters()[::every])


def _layout(work: Work, shape: Shape, memory: Memory, device: torch.device) -> Layout:
    packed = torch.from_numpy(pack(work, shape, memory)).to(device)
    return unpack(packed, packed.new_zeros((2 if work.candidates else 0, work.candidates)), shape)


def _attended(
    operations: Operations, query: Tensor, keys_values: Tensor, layout: Layout, memory: Memory, shape: Shape
) -> Tensor:
    return operations.tree_attention(
        query, keys_values, layout.starts, layout.missing, layout.counts, layout.slots, layout.cached,
        layout.flat_columns, memory.cells, shape.columns, shape.span,
    )  # fmt: skip


def _layer_results(
    operations: Operations, config: ValueModelConfig, draw: _Draw, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Of rows that lag, wait, drew a candidate, and reach over several chunks of attention."""
    work = Work(
        [
            RowWork(slot=2, cached=9, missing=[1, 2], candidates_of=0, drawn=5),
            RowWork(slot=0, cached=0, missing=[1] * 8),
            RowWork(slot=1, cached=_CELLS - 20, missing=[], candidates_of=1, drawn=6),
        ],
        candidates=3,
    )
    memory = Memory(slots=4, cells=_CELLS)
    shape = padded_shape(work.num_tokens, work.candidates, _CELLS)
    layout = _layout(work, shape, memory, device)
    size, heads = config.head_dim, config.heads + config.kv_heads
    x = draw(shape.tokens, config.hidden)
    yield "add_norm", operations.add_norm(x, draw(*x.shape), draw(config.hidden), _EPSILON)
    yield "add_norm", x
    yield "add_norm", operations.add_norm(x, None, draw(config.hidden), _EPSILON)
    yield "gated", operations.gated(draw(shape.tokens, 2 * config.ffn))
    keys_values = draw(memory.slots * memory.cells, 2, config.kv_heads, size)
    norm = draw(heads, size) if config.has_head_norm else None
    # Cosines and sines are 1 at most.
    qkv, rotations = draw(shape.tokens, (heads + config.kv_heads) * size), draw(_CELLS, 2, size).clamp_(-1, 1)
    query = operations.turn_and_store(qkv, rotations, layout.positions, layout.cells, keys_values, norm, _EPSILON)
    yield "turn_and_store", query
    # The cell of padding is written by many tokens, in any order.
    own = keys_values[: memory.spare_slot * memory.cells]
    yield "turn_and_store", own
    yield "tree_attention", _attended(operations, query, keys_values, layout, memory, shape)[: work.num_tokens]
    ids = torch.tensor([[1, 2, 3, 4], [9, 8, 6, 7], [3, 4, 5, -1], [0, 0, 0, 0]], device=device)
    unknown = torch.zeros((), dtype=torch.int64, device=device)
    operations.keep_drawn(keys_values[None], ids, unknown, layout.slots, layout.cached, layout.drawn, memory.cells)
    yield "keep_drawn", own
    yield "keep_drawn", unknown


def _sampling_results(
    operations: Operations,
    draw: _Draw,
    device: torch.device,
    vocabulary: int,
    width: int,
    params: list[GuidanceParams],
) -> Iterator[tuple[str, Tensor]]:
    """Of rows of all rules, filters open and closed, tokens that end an answer, and rows that are left alone."""
    rows = len(params)
    scores = 3 * draw(rows, vocabulary)
    top, ids = torch.topk(scores, width, dim=1)
    limits = torch.tensor(
        [
            limit_numbers(
                temperature=0.3 + 0.1 * (row % 9),
                top_k=(2 + row) % 9,
                top_p=(1.0, 0.01, 1e-4)[row % 3],
                min_p=(0.0, 0.02)[row % 2],
                threshold=(None, 0.9)[row % 5 == 0],
                is_due=row % 7 != 0,
                is_ours=row % 4 != 0,
            )
            for row in range(rows)
        ],
        dtype=torch.float64,
        device=device,
    )
    mass = operations.vocabulary_mass(scores, top, limits).sum(dim=1, keepdim=True)
    yield "vocabulary_mass", torch.log(mass)
    for total in (None, mass):
        yield from (("filter_candidates", part) for part in operations.filter_candidates(top, total, limits))
    # Of the same numbers from here on, so that one operation is not blamed for another.
    probs, mask, counts = PLAIN.filter_candidates(top, None, limits)
    raw = 2 * draw(rows, width)
    lines = torch.tensor([-1 if row % 11 == 0 else rows - 1 - row for row in range(rows)], device=device)
    modes = mode_batch(params, device, list(range(rows)))
    given = (probs, mask, counts, ids, raw, lines, ids[1::5, 1].contiguous(), modes.table, modes.rules)
    yield "tilt_candidates", operations.tilt_candidates(*given).exp()
    written = scores.clone()
    index = torch.arange(rows, device=device).flip(0)
    operations.write_candidates(written, index, ids, PLAIN.tilt_candidates(*given), counts, limits)
    yield "write_candidates", torch.softmax(written, dim=1)


def _parameters() -> list[GuidanceParams]:
    """Rows of every rule, pulled either way, and of neutral and extreme scales."""
    scaled = product(MODES, (-3.0, 0.0, 0.4, 1.0, 1.8, 40.0), (None, 0.4))
    aimed = product(CONSTRAINTS, (0.0, 0.3, 0.6, 0.97))
    return [
        *(
            GuidanceParams(mode=mode, value_scale=scale, value_min=least, gamma=0.99)
            for mode, scale, least in scaled
        ),
        *(GuidanceParams(target_value=value, value_constraint=rule, gamma=0.99) for rule, value in aimed),
    ]
