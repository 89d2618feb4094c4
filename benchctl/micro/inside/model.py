"""A dense model with random weights, and one forward pass over static buffers.

A pass is computed as a serving engine computes it, with the operators of torch.

**As in engines.** One product for query, key and value, one for gate and up projection; products of residual
branches add to the residual stream in place; keys and values go into the cache by slot and attention reads them
from it; attention is torch's fused kernel; logits are computed for the last position of each sequence alone. All
inputs lie in buffers that do not move, so that the same pass can be captured in a graph.

**Left out.** The scheduler, the preparation of inputs (token ids, positions, slots, the page table), sampling, and
copies between host and device. These are what an engine's step adds to its forward pass.

**Unlike engines.** Torch has no kernel that joins a norm with a residual addition, that rotates queries and keys
at once, or that writes keys and values at once: a layer is 14 operators here (16 with norms of queries and keys)
where an engine has some 10. Attention over pages gathers them into one buffer first, two operators more that read
and write the cached context one time more: the paged layout is an upper bound for an engine's kernel, the
contiguous one a lower bound.

**Buffers.** Whatever can be written into a buffer is. Norms, the activation and attention allocate their results
from the allocator's cache, which the warm-up fills; ``replays`` counts what still reaches the device.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch.nn import functional

STANDARD_DEVIATION = 0.02
"""Of weights, as models are initialised; larger ones would overflow half precision."""
PAGE_TOKENS = 16
"""Tokens of one page of a paged cache."""
_ROPE_THETA = 10_000.0
_NORM_EPS = 1e-6
_HALVES = (torch.float16, torch.bfloat16)
_ROUNDINGS = 16
"""Units of rounding by which the largest outputs of two orders of the same sums may differ."""


@dataclass(frozen=True)
class PassPoint:
    """One forward pass: see ``benchctl.profile.choices.ForwardPoint``, whose fields these are."""

    phase: Literal["decode", "prefill"]
    batch_size: int
    new_tokens: int = 1
    context_tokens: int = 0

    @property
    def total_new_tokens(self) -> int:
        return self.batch_size * self.new_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of one sequence after the pass."""
        return self.context_tokens + self.new_tokens

    def __str__(self) -> str:
        return (
            f"{self.phase} of {self.batch_size} sequences with {self.new_tokens} new and {self.context_tokens} "
            "cached tokens each"
        )


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer, matrices as ``[outputs, inputs]``."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """``[(Hq + 2 Hkv) h, d]``: rows of all query heads, then of key heads, then of value heads."""
    qkv_bias: torch.Tensor | None
    head_norms: torch.Tensor | None
    """``[Hq + Hkv, h]``: the norm of queries repeated for each query head, that of keys for each key head."""
    output: torch.Tensor
    block_norm: torch.Tensor
    gate_up: torch.Tensor
    """``[2 ff, d]``: rows of the gate, then of the up projection."""
    down: torch.Tensor


class Model:
    """The weights of a model on a device, and the passes that use them.

    Blocks are those of Llama, Qwen2 (with biases of query, key and value) or Qwen3 (with norms of queries and
    keys). ``dimensions`` has the fields of ``benchctl.costs.model_shape.ModelShape``, of a dense model.
    Weights are drawn from a normal distribution, norms around 1, so that a pass that forgets one is seen. Those of
    equal seed on one kind of device are equal.
    """

    def __init__(self, settings: Mapping[str, Any], device: torch.device) -> None:
        """``settings`` are ``shape``, ``dtype``, ``kv_layout`` and ``seed``."""
        self.dimensions = d = SimpleNamespace(**settings["shape"])
        self.qkv_heads = d.q_heads + 2 * d.kv_heads
        """Heads of query, key and value together: rows of one product."""
        self.device = device
        self.dtype = getattr(torch, settings["dtype"])
        self.name = f"{d.name} in {settings['dtype']} on {device}"
        self._page_tokens = PAGE_TOKENS if settings["kv_layout"] == "paged" else None
        self._seed = settings["seed"]
        self._generator = torch.Generator(device).manual_seed(self._seed)
        self.embedding = self._matrix(d.vocab, d.hidden)
        """``[V, d]``."""
        self.layers = tuple(self._layer() for _ in range(d.layers))
        self.head = self.embedding if d.tied_embeddings else self._matrix(d.vocab, d.hidden)
        """``[V, d]``; the embedding itself where both are tied."""
        self.final_norm = self._norm(d.hidden)

    def make(self, point: PassPoint) -> "ForwardPass":
        """Allocate a pass."""
        generator = torch.Generator().manual_seed(self._seed)
        tokens = torch.randint(self.dimensions.vocab, (point.batch_size, point.new_tokens), generator=generator)
        cache = KvCache(self, point.batch_size, point.total_tokens, page_tokens=self._page_tokens, seed=self._seed)
        return ForwardPass(self, cache, point, tokens.to(self.device))

    def empty(self, *sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=self.dtype, device=self.device)

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        return self.empty(rows, columns).normal_(0.0, STANDARD_DEVIATION, generator=self._generator)

    def _norm(self, width: int) -> torch.Tensor:
        return self.empty(width).normal_(1.0, 0.1, generator=self._generator)

    def _layer(self) -> LayerWeights:
        d = self.dimensions
        qkv_rows = self.qkv_heads * d.head_dim
        return LayerWeights(
            attention_norm=self._norm(d.hidden),
            qkv=self._matrix(qkv_rows, d.hidden),
            qkv_bias=self._matrix(1, qkv_rows)[0] if d.qkv_bias else None,
            head_norms=torch.cat(
                [self._norm(d.head_dim).expand(heads, -1) for heads in (d.q_heads, d.kv_heads)]
            ).contiguous()
            if d.qk_norm
            else None,
            output=self._matrix(d.hidden, d.q_heads * d.head_dim),
            block_norm=self._norm(d.hidden),
            gate_up=self._matrix(2 * d.ffn, d.hidden),
            down=self._matrix(d.hidden, d.ffn),
        )


class KvCache:
    """The cache of keys and values: one tensor of pages, which a sequence holds in any order.

    A layer is ``[pages, 2, page tokens, Hkv, h]``, keys before values. In the contiguous layout the one page of a
    sequence has room for all of its tokens, and attention sees a view of it. In the paged layout the pages of all
    sequences lie in random order, as in the pool of an engine that has run for a while, and a pass gathers those of
    a layer into one buffer first, in the order of their tokens.
    """

    def __init__(
        self, model: Model, sequences: int, tokens: int, *, page_tokens: int | None = None, seed: int
    ) -> None:
        """Room for ``tokens`` of each sequence, in pages, or with None in one stretch.

        Its contents are random: attention over zeros would be as fast, but draws less power.
        """
        d, self._page_tokens = model.dimensions, page_tokens or tokens
        self._shape = (sequences, -(-tokens // self._page_tokens))
        num_pages = math.prod(self._shape)
        pages = model.empty(d.layers, num_pages, 2, self._page_tokens, d.kv_heads, d.head_dim)
        self.pages = pages.normal_(generator=torch.Generator(model.device).manual_seed(seed))
        order, self.gathered = torch.arange(num_pages), None
        if self._shape[1] > 1:
            order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
            self.gathered = model.empty(2, num_pages, self._page_tokens, d.kv_heads, d.head_dim)
        self._page_ids = order.to(model.device)
        """Of all sequences in turn, in the order of the tokens that they hold."""

    def slots(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of keys and of values in a layer's ``rows``, for ``positions`` of every sequence in turn."""
        tokens, table = self._page_tokens, self._page_ids.reshape(self._shape)
        keys = table[:, positions // tokens] * (2 * tokens) + positions % tokens
        return keys.reshape(-1), (keys + tokens).reshape(-1)

    def rows(self, layer: int) -> torch.Tensor:
        """A layer as ``[rows, Hkv, h]``: one row for a token's keys, one for its values."""
        return self.pages[layer].flatten(0, 2)

    def gather(self, layer: int) -> None:
        """Bring the pages of a layer into the buffer that its views show; nothing in the contiguous layout."""
        if self.gathered is not None:
            for kind in (0, 1):
                torch.index_select(self.pages[layer, :, kind], 0, self._page_ids, out=self.gathered[kind])

    def views(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first ``tokens`` of every sequence, ``[B, Hkv, tokens, h]``, without a copy."""
        keys, values = self.pages[layer].unbind(1) if self.gathered is None else self.gathered.unbind(0)
        keys, values = (each.unflatten(0, self._shape).flatten(1, 2)[:, :tokens] for each in (keys, values))
        return keys.transpose(1, 2), values.transpose(1, 2)


class ForwardPass:
    """The pass of one point: buffers, and ``run``, which computes ``logits`` from ``tokens`` and the cache.

    ``tokens`` are ``[B, n]``; their keys and values replace those of the cache at positions c to c + n - 1, and
    each token attends to all positions up to its own. A run gives the same logits as the one before.
    """

    def __init__(self, model: Model, cache: KvCache, point: PassPoint, tokens: torch.Tensor) -> None:
        d = model.dimensions
        self.model, self.cache, self.point = model, cache, point
        self.tokens = tokens.reshape(-1)
        rows = point.total_new_tokens
        positions = torch.arange(point.context_tokens, point.total_tokens, device=model.device)
        self._cos, self._sin = rotation(d.head_dim, positions.repeat(point.batch_size), model.dtype)
        self._key_slots, self._value_slots = cache.slots(positions)
        self._cache_rows = [cache.rows(layer) for layer in range(d.layers)]
        self._cache_views = [cache.views(layer, point.total_tokens) for layer in range(d.layers)]
        self._hidden = model.empty(rows, d.hidden)
        self._qkv = model.empty(rows, model.qkv_heads, d.head_dim)
        self._rotated = model.empty(rows, d.q_heads + d.kv_heads, d.head_dim)
        self._gate_up = model.empty(rows, 2 * d.ffn)
        self._activated = model.empty(rows, d.ffn)
        self.logits = model.empty(point.batch_size, d.vocab)
        """``[B, V]``: those of the last position of each sequence."""
        self._last_rows = slice(point.new_tokens - 1, None, point.new_tokens)
        queries = self._rotated[:, : d.q_heads]
        self._queries = (
            queries.unflatten(1, (d.kv_heads, -1))
            if point.phase == "decode"
            else queries.unflatten(0, (point.batch_size, -1)).transpose(1, 2)
        )
        self._attention_options = self._options_of_attention()

    def run(self) -> None:
        """Compute ``logits``; every tensor that another run would need lies where it lay."""
        torch.index_select(self.model.embedding, 0, self.tokens, out=self._hidden)
        for index, layer in enumerate(self.model.layers):
            self._project(layer)
            self._rotate()
            self._store(index)
            torch.addmm(self._hidden, self._attend(index), layer.output.t(), out=self._hidden)
            self._add_block(layer)
        last = self._norm(self._hidden, self.model.final_norm)[self._last_rows]
        torch.mm(last, self.model.head.t(), out=self.logits)

    @property
    def tolerance(self) -> float:
        """The largest difference of two outputs that rounding explains."""
        return _ROUNDINGS * torch.finfo(self.logits.dtype).eps

    def difference(self, logits: torch.Tensor) -> float:
        """The largest difference between ``logits`` and those of the last run, in units of the largest.

        NaN where either has a number that is not finite.
        """
        now, before = self.logits.float(), logits.float()
        return ((now - before).abs().max() / now.abs().max()).item()

    def _norm(self, values: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return functional.rms_norm(values, values.shape[-1:], weight, _NORM_EPS)

    def _project(self, layer: LayerWeights) -> None:
        """Query, key and value of all heads."""
        normed = self._norm(self._hidden, layer.attention_norm)
        flat = self._qkv.flatten(1)
        if layer.qkv_bias is None:
            torch.mm(normed, layer.qkv.t(), out=flat)
        else:
            torch.addmm(layer.qkv_bias, normed, layer.qkv.t(), out=flat)
        if layer.head_norms is not None:
            heads = self._qkv[:, : layer.head_norms.shape[0]]
            torch.mul(self._norm(heads, None), layer.head_norms, out=heads)

    def _rotate(self) -> None:
        """Rotary embedding of queries and keys: (a, b) to (a cos - b sin, b cos + a sin), half by half."""
        half = self._cos.shape[-1] // 2
        plain, rotated = self._qkv[:, : self._rotated.shape[1]], self._rotated
        torch.mul(plain, self._cos, out=rotated)
        rotated[..., :half].addcmul_(plain[..., half:], self._sin, value=-1)
        rotated[..., half:].addcmul_(plain[..., :half], self._sin)

    def _store(self, layer: int) -> None:
        """New keys and values into the cache."""
        d, rows = self.model.dimensions, self._cache_rows[layer]
        rows.index_copy_(0, self._key_slots, self._rotated[:, d.q_heads :])
        rows.index_copy_(0, self._value_slots, self._qkv[:, d.q_heads + d.kv_heads :])

    def _attend(self, layer: int) -> torch.Tensor:
        """``[T, Hq h]``: the weighted sums of values for each new token.

        A decode has one new token for each sequence, which sees every position, so that it needs no mask. The query
        heads that share a key head are passed as rows of one head: keys and values are read once for a group, and
        not widened to one copy for each query head. A prefill takes the kernels of prompts.
        """
        self.cache.gather(layer)
        keys, values = self._cache_views[layer]
        options = self._attention_options
        attended = functional.scaled_dot_product_attention(self._queries, keys, values, **options)
        if self.point.phase == "prefill":
            attended = attended.transpose(1, 2)
        return attended.reshape(self.point.total_new_tokens, -1)

    def _options_of_attention(self) -> dict[str, Any]:
        """Of a prompt: the causal mask ``[n, c + n]``, which is aligned to the end of its c cached tokens."""
        d, point = self.model.dimensions, self.point
        if point.phase == "decode":
            return {}
        options: dict[str, Any] = {"enable_gqa": d.q_heads != d.kv_heads}
        if point.new_tokens == 1:
            return options
        if point.context_tokens == 0:
            return options | {"is_causal": True}
        if self.model.device.type == "cuda" and self.model.dtype in _HALVES:
            # Flash attention knows this mask by its name and does not read one. The module is imported here alone:
            # it brings torch's compiler with it, seconds of the start of every worker.
            bias = import_module("torch.nn.attention.bias")
            return options | {"attn_mask": bias.causal_lower_right(point.new_tokens, point.total_tokens)}
        mask = torch.ones(point.new_tokens, point.total_tokens, dtype=torch.bool, device=self.model.device)
        return options | {"attn_mask": mask.tril(point.context_tokens)}

    def _add_block(self, layer: LayerWeights) -> None:
        """The gated block: down(silu(gate) * up), added to the residual stream."""
        normed = self._norm(self._hidden, layer.block_norm)
        torch.mm(normed, layer.gate_up.t(), out=self._gate_up)
        gate, up = self._gate_up.chunk(2, dim=1)
        torch.mul(functional.silu(gate), up, out=self._activated)
        torch.addmm(self._hidden, self._activated, layer.down.t(), out=self._hidden)


def rotation(head_dim: int, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines ``[T, 1, h]`` (both halves) and sines ``[T, 1, h / 2]`` of rotary embeddings at ``positions``.

    The angle of pair i at position p is p θ^(-2i/h) (Su et al., arXiv 2104.09864); pair i are elements i and
    i + h/2 of a head, as in checkpoints of Llama and Qwen.
    """
    exponents = torch.arange(head_dim // 2, dtype=torch.float32, device=positions.device) * (2 / head_dim)
    frequencies = torch.exp(-math.log(_ROPE_THETA) * exponents)
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype), angles.sin().to(dtype)
