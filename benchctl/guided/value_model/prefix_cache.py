"""Keys and values of prefixes in memory that is taken once, and attention over them."""

import torch
from torch import Tensor
from torch.nn import functional

from benchctl.guided.value_model.layout import Layout, Memory, Shape
from benchctl.guided.value_model.value_model import ValueModelConfig


class PrefixCache:
    """Static memory for keys and values: slots of equal size, each for one sequence."""

    def __init__(self, config: ValueModelConfig, memory: Memory, device: torch.device, dtype: torch.dtype) -> None:
        self.memory = memory
        self.group = config.heads // config.kv_heads
        size = (2, config.layers, memory.slots, memory.cells, config.kv_heads, config.head_dim)
        # Cells that nothing was written to are masked, but must hold numbers: 0 times what is not one is not 0.
        self._cells = torch.zeros(size, device=device, dtype=dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self._cells.dtype

    @property
    def num_bytes(self) -> int:
        return int(self._cells.nbytes)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [slots, cells, kv_heads, head_dim]."""
        return self._cells[0, number], self._cells[1, number]

    def copy_prefix(self, source: int, target: int, start: int, end: int) -> None:
        """Give a slot the tokens from ``start`` to ``end`` of another one."""
        self._cells[:, :, target, start:end] = self._cells[:, :, source, start:end]


class TreeAttention:
    """Attention of one forward pass: writes keys and values into the cache, then reads what each token sees.

    Query heads that share a key head become columns of their own, so that keys need not be repeated.
    """

    def __init__(self, cache: PrefixCache, layout: Layout, shape: Shape) -> None:
        self._cache, self._layout, self._shape = cache, layout, shape
        mask = torch.zeros_like(layout.visible, dtype=cache.dtype).masked_fill_(~layout.visible, -torch.inf)
        # One for all layers and heads; a mask of numbers, into which torch would turn any other in each layer.
        self._mask = mask.repeat_interleave(cache.group, dim=1)[:, None]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layout, shape = self._layout, self._shape
        keys, values = self._cache.layer(layer)
        keys.flatten(0, 1).index_copy_(0, layout.cells, key)
        values.flatten(0, 1).index_copy_(0, layout.cells, value)
        grouped = query.unflatten(1, (-1, self._cache.group))
        by_row = grouped[layout.columns].unflatten(0, (shape.rows, shape.columns))
        drawn = functional.scaled_dot_product_attention(
            by_row.permute(0, 2, 1, 3, 4).flatten(2, 3),
            self._visible_cells(keys),
            self._visible_cells(values),
            self._mask,
        )
        by_column = drawn.unflatten(2, (shape.columns, self._cache.group)).permute(0, 2, 1, 3, 4)
        return by_column.flatten(0, 1).flatten(1)[layout.flat_columns]

    def _visible_cells(self, cells: Tensor) -> Tensor:
        """[rows, kv_heads, span, head_dim] of the rows' slots."""
        part = cells[:, : self._shape.span]
        rows = part[: self._shape.rows] if self._shape.is_direct else part.index_select(0, self._layout.slots)
        return rows.transpose(1, 2)
