"""Decode steps of a base model of random weights, and what a step takes by the host and by events of the device."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from benchctl.costs.model_shape import ModelShape
from benchctl.guided.value_model.layout import Memory, RowWork, Shape, Work, exact_shape, pack, unpack
from benchctl.guided.value_model.prefix_cache import PrefixCache
from benchctl.guided.value_model.value_model import random_value_model


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of one step; by the device's events None where there are none."""

    host_ms: float
    device_ms: float | None

    def less(self, other: "Times") -> "Times":
        is_known = self.device_ms is not None and other.device_ms is not None
        return Times(
            host_ms=self.host_ms - other.host_ms, device_ms=self.device_ms - other.device_ms if is_known else None
        )


@dataclass(frozen=True)
class Repeated:
    """A step that can be taken again and again from the same beginning."""

    step: Callable[[], object]
    begin: Callable[[], object] = lambda: None


def timed(repeated: Repeated, count: int, device: torch.device) -> Times:
    """The mean by the host over ``count`` steps, and the median by events around each."""
    # Once untimed, and a little further: sizes are recorded as CUDA graphs when they occur the second time.
    for length in (count + 6, 2):
        repeated.begin()
        for _ in range(length):
            repeated.step()
    is_cuda = device.type == "cuda"
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count * is_cuda)
    ]
    wait(device)
    start = time.perf_counter()
    for number in range(count):
        if is_cuda:
            events[number][0].record()
        repeated.step()
        if is_cuda:
            events[number][1].record()
    wait(device)
    host_ms = (time.perf_counter() - start) / count * 1e3
    return Times(
        host_ms=host_ms,
        device_ms=statistics.median(before.elapsed_time(after) for before, after in events) if events else None,
    )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def config_of(shape: ModelShape) -> Any:
    """The configuration of a Qwen2 of this shape."""
    return AutoConfig.for_model(
        "qwen2",
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocab,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


class BaseModel:
    """Decode steps of a causal language model: the same backbone code, with a projection on the vocabulary."""

    def __init__(self, shape: ModelShape, rows: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self._model = random_value_model(config_of(shape), device, dtype)
        self._memory = Memory(slots=rows + 1, cells=-(-(tokens + 1) // 64) * 64)
        self._cache = PrefixCache(self._model.config, self._memory, device, dtype, max_candidates=1)
        self._rotations = self._model.rotations(self._memory.cells)
        drawn = torch.empty(shape.vocab, shape.hidden, device=device, dtype=dtype)
        self._projection = drawn.normal_(0, 0.02)
        self._device = device

    def step(self, batch: int, context: int) -> Callable[[], Tensor]:
        """A function that runs one step for ``batch`` rows of ``context`` tokens; a graph where there is CUDA."""
        work = Work([RowWork(slot=row, cached=context, missing=[1]) for row in range(batch)], 0)
        shape = exact_shape(work)
        packed = torch.from_numpy(pack(work, shape, self._memory)).to(self._device)
        if self._device.type != "cuda":
            return lambda: self._run(packed, shape)
        self._run(packed, shape)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._run(packed, shape)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    @torch.no_grad()
    def _run(self, packed: Tensor, shape: Shape) -> Tensor:
        layout = unpack(packed, torch.zeros((shape.rows, 0), dtype=torch.int64, device=self._device), shape)
        return self._model.hidden(layout, shape, self._rotations, self._cache) @ self._projection.T
