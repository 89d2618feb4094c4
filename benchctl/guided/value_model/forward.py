"""One forward pass of a value model over some work, recorded as a CUDA graph where that is possible."""

from typing import Final

import torch
from torch import Tensor

from benchctl.guided.value_model.layout import Shape, Work, pack, pass_rows, plan_shape, unpack
from benchctl.guided.value_model.prefix_cache import PrefixCache, TreeAttention
from benchctl.guided.value_model.value_model import ValueModel

MAX_GRAPHS: Final = 256
"""Sizes beyond these are computed without a graph."""


class ForwardPass:
    """Runs the model; counts what it runs."""

    def __init__(self, model: ValueModel, cache: PrefixCache, *, graphs: bool) -> None:
        self._model, self._cache = model, cache
        self._rotations = model.rotations(cache.memory.cells)
        self._is_padded = graphs
        self._graphs: dict[Shape, _Recorded | None] = {}
        self._has_graphs = graphs and model.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._has_graphs else None
        self.num_forwards = self.num_tokens = self.num_captures = self.num_replays = 0

    def __call__(self, work: Work, candidates: Tensor | None) -> Tensor:
        """Write the missing tokens of all rows into the cache; raw values [B, K] of ``candidates`` [B, K]."""
        memory, device = self._cache.memory, self._model.device
        # Prefill is of any size and far from idle: rounding and recording would bring it nothing.
        is_decode = candidates is not None
        shape = plan_shape(work, memory, is_padded=self._is_padded and is_decode)
        packed = self._to_device(torch.from_numpy(pack(work, shape, memory)))
        self.num_forwards += 1
        self.num_tokens += shape.tokens
        if candidates is None:
            candidates = torch.zeros((shape.rows, 0), dtype=torch.int64, device=device)
            return self._run(packed, candidates, shape)
        row_of = pass_rows(work, shape)
        line = torch.zeros(shape.rows, dtype=torch.int64)
        line[row_of] = torch.arange(len(row_of))
        moves = self._to_device(torch.cat((line, torch.from_numpy(row_of))))
        by_row = candidates.index_select(0, moves[: shape.rows])
        raw = self._replay(packed, by_row, shape) if self._has_graphs else self._run(packed, by_row, shape)
        return raw.index_select(0, moves[shape.rows :])

    def _run(self, packed: Tensor, candidates: Tensor, shape: Shape) -> Tensor:
        """Raw values [R, K], by row of the pass."""
        layout = unpack(packed, candidates, shape)
        attention = TreeAttention(self._cache, layout, shape)
        scored = slice(shape.extension, None)
        raw = self._model.forward(layout.tokens, self._rotations[layout.positions], attention, scored)
        return raw.unflatten(0, (shape.rows, shape.candidates))

    def _replay(self, packed: Tensor, candidates: Tensor, shape: Shape) -> Tensor:
        """As ``_run``; a size is recorded when it occurs the second time, the first time having prepared it."""
        if shape not in self._graphs:
            if len(self._graphs) < MAX_GRAPHS:
                self._graphs[shape] = None
            return self._run(packed, candidates, shape)
        recorded = self._graphs[shape]
        if recorded is None:
            recorded = self._graphs[shape] = self._record(packed, candidates, shape)
        self.num_replays += 1
        return recorded.replay(packed, candidates)

    def _record(self, packed: Tensor, candidates: Tensor, shape: Shape) -> "_Recorded":
        packed, candidates = packed.clone(), candidates.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            raw = self._run(packed, candidates, shape)
        self.num_captures += 1
        return _Recorded(graph, packed, candidates, raw)

    def _to_device(self, numbers: Tensor) -> Tensor:
        if self._model.device.type != "cuda":
            return numbers.to(self._model.device)
        return numbers.pin_memory().to(self._model.device, non_blocking=True)


class _Recorded:
    """A CUDA graph with the memory that it reads from and writes to."""

    def __init__(self, graph: "torch.cuda.CUDAGraph", packed: Tensor, candidates: Tensor, raw: Tensor) -> None:
        self._graph, self._packed, self._candidates, self._raw = graph, packed, candidates, raw

    def replay(self, packed: Tensor, candidates: Tensor) -> Tensor:
        """Raw values, to be read before the next replay."""
        self._packed.copy_(packed)
        self._candidates.copy_(candidates)
        self._graph.replay()
        return self._raw
