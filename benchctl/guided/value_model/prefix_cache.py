"""Keys and values of prefixes, in memory that is allocated once, and the candidates behind each prefix."""

import torch
from torch import Tensor
from torch.nn import functional

from benchctl.guided.operations.registry import PLAIN, Operations
from benchctl.guided.value_model.layout import Layout, Memory
from benchctl.guided.value_model.value_model import ValueModelConfig


class PrefixCache:
    """Static memory for keys and values: slots of equal size, each for one sequence.

    It also remembers which candidates lie behind the prefix of each slot, so that the one which the server draws
    can become part of the prefix.
    """

    def __init__(
        self,
        config: ValueModelConfig,
        memory: Memory,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_candidates: int,
        operations: Operations = PLAIN,
    ) -> None:
        self.memory, self._operations = memory, operations
        self.group = config.heads // config.kv_heads
        size = (config.layers, memory.slots * memory.cells, 2, config.kv_heads, config.head_dim)
        # Cells that nothing was written to are masked, but must hold numbers: 0 times what is not one is not 0.
        self._cells = torch.zeros(size, device=device, dtype=dtype)
        self._ids = torch.full((memory.slots, max_candidates), -1, device=device, dtype=torch.int64)
        self._unknown = torch.zeros((), device=device, dtype=torch.int64)

    @property
    def dtype(self) -> torch.dtype:
        return self._cells.dtype

    @property
    def num_bytes(self) -> int:
        return int(self._cells.nbytes)

    @property
    def num_unknown(self) -> Tensor:
        """On the device: the drawn tokens since the start that were none of their rows' candidates."""
        return self._unknown

    def layer(self, number: int) -> Tensor:
        """Keys and values of a layer [slots * cells, 2, kv_heads, head_dim]."""
        return self._cells[number]

    def copy_prefix(self, source: int, target: int, start: int, end: int) -> None:
        """Give a slot the tokens from ``start`` to ``end`` of another one."""
        by_slot = self._cells.unflatten(1, (self.memory.slots, self.memory.cells))
        by_slot[:, target, start:end] = by_slot[:, source, start:end]

    def keep_drawn(self, layout: Layout) -> None:
        """Move the drawn candidate of each row, in all layers, to the end of its prefix."""
        self._operations.keep_drawn(
            self._cells, self._ids, self._unknown, layout.slots, layout.cached, layout.drawn, self.memory.cells
        )

    def remember(self, layout: Layout) -> None:
        """Remember the candidates of each row."""
        absent = self._ids.shape[1] - layout.candidates.shape[1]
        self._ids.index_copy_(0, layout.slots, functional.pad(layout.candidates, (0, absent), value=-1))
