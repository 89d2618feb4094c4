"""Decode steps of a base model of random weights, and the sampling behind them, as a server runs them.

Imports torch, numpy and benchctl alone, so that it runs where nothing can be installed.
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchctl.costs.model_shape import ModelShape
from benchctl.guided.kernels.check import choose_operations
from benchctl.guided.value_model.layout import Memory, RowWork, Work, exact_shape, pack, unpack
from benchctl.guided.value_model.prefixes import PrefixCache
from benchctl.guided.value_model.value_model import random_value_model

TINY_BASE = ModelShape(
    name="tiny-base", layers=2, hidden=64, q_heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512, qkv_bias=True
)
TINY_VALUE = replace(TINY_BASE, name="tiny-value", layers=1)
TORCH_ATTENTION, OWN_ATTENTION = "torch", "the value model's operation"
_CELLS_STEP = 64
_TRIAL_REPLAYS = 20


@dataclass(frozen=True, kw_only=True)
class Qwen2Config:
    """What a model of random weights is made from, by the names that transformers gives it."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    model_type: str = "qwen2"
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 1e6})


def config_of(shape: ModelShape) -> Any:
    """The configuration of a Qwen2 of this shape."""
    return Qwen2Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocab,
    )


class BaseModel:
    """A causal language model of random weights: the code of value models, with a projection on the vocabulary.

    Its rows are all of one length, which stays as it is: a step reads the same number of keys each time.
    """

    def __init__(self, shape: ModelShape, rows: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self._model = random_value_model(config_of(shape), device, dtype)
        chosen = choose_operations(self._model.config, device, dtype, kernels=True)
        self.kernels_reason = chosen.reason
        self._own = chosen.operations
        self._memory = Memory(slots=rows + 1, cells=-(-(tokens + 1) // _CELLS_STEP) * _CELLS_STEP)
        self._cache = PrefixCache(self._model.config, self._memory, device, dtype, max_candidates=1)
        self._rotations = self._model.rotations(self._memory.cells)
        drawn = torch.empty(shape.vocab, shape.hidden, device=device, dtype=dtype)
        self._projection = drawn.normal_(0, 0.02)
        self._device = device

    def step(self, batch: int, context: int) -> "BaseStep":
        """A step for ``batch`` rows of ``context`` tokens: of two ways to compute its attention, the faster.

        A slow base model would make guidance look cheap.
        """
        if self._device.type != "cuda":
            return self._made(batch, context, TORCH_ATTENTION)
        steps = []
        for attention in (TORCH_ATTENTION, OWN_ATTENTION):
            try:
                steps.append(self._made(batch, context, attention))
            except RuntimeError as error:  # one of the two is enough
                print(f"the base model cannot be recorded with attention by {attention}: {error}", file=sys.stderr)
        return min(steps, key=lambda step: device_ms(step.run, self._device))

    def _made(self, batch: int, context: int, attention: str) -> "BaseStep":
        work = Work([RowWork(slot=row, cached=context, missing=[1]) for row in range(batch)], 0)
        shape = exact_shape(work)
        packed = torch.from_numpy(pack(work, shape, self._memory)).to(self._device)
        operations = (
            replace(self._own, tree_attention=attention_of_equal_rows)
            if attention == TORCH_ATTENTION
            else self._own
        )

        @torch.no_grad()
        def run() -> Tensor:
            self._model.operations = operations
            nothing = torch.zeros((shape.rows, 0), dtype=torch.int64, device=self._device)
            hidden = self._model.hidden(unpack(packed, nothing, shape), shape, self._rotations, self._cache)
            return hidden @ self._projection.T

        return BaseStep(
            run=recorded(run) if self._device.type == "cuda" else run, tokens=packed[:batch], attention=attention
        )


@dataclass(frozen=True, kw_only=True)
class BaseStep:
    """A step of the base model: ``run`` gives the logits [B, V] of the ``tokens`` [B] that were put there."""

    run: Callable[[], Tensor]
    tokens: Tensor
    attention: str
    """How it is computed: ``TORCH_ATTENTION`` over rows of one length, or ``OWN_ATTENTION`` as for value models."""


def attention_of_equal_rows(
    query: Tensor, cache: Tensor, _starts: Tensor, _missing: Tensor, _counts: Tensor, _slots: Tensor,
    _cached: Tensor, _flat_columns: Tensor, cells_per_slot: int, _columns: int, span: int,
) -> Tensor:  # fmt: skip
    """``tree_attention`` where row b has slot b, one token, and ``span`` cells: [T, heads * head_dim]."""
    by_slot = cache.unflatten(0, (-1, cells_per_slot))[: query.shape[0], :span]
    keys, values = by_slot.permute(2, 0, 3, 1, 4)
    return functional.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True).flatten(1)


def recorded(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same work as a CUDA graph."""
    run()  # prepares the libraries, which cannot be done while recording
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def device_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call by events of the device, over a few in a row."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(_TRIAL_REPLAYS):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / _TRIAL_REPLAYS


def sample(logits: Tensor) -> Tensor:
    """A token [B] of each row, drawn from the softmax of ``logits`` [B, V] without waiting for the device."""
    probs = torch.softmax(logits, dim=-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_unused(device: torch.device) -> None:
    """Give memory that nothing uses any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
