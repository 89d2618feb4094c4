"""One forward pass over static buffers, as a serving engine computes it with the operators of torch.

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

import torch
from torch.nn import functional

from benchctl.micro.inside.attention import Attention, DecodeAttention, GatheredPages, PromptAttention
from benchctl.micro.inside.dimensions import PassPoint
from benchctl.micro.inside.kv_cache import KvCache
from benchctl.micro.inside.model import LayerWeights, ModelWeights, rotation


class ForwardPass:
    """The pass of one point: buffers, and ``run``, which computes ``logits`` from ``tokens`` and the cache.

    ``tokens`` are ``[B, n]``; their keys and values replace those of the cache at positions c to c + n - 1, and
    each token attends to all positions up to its own. A run gives the same logits as the one before.
    """

    def __init__(self, weights: ModelWeights, cache: KvCache, point: PassPoint, tokens: torch.Tensor) -> None:
        d = weights.dimensions
        self.weights, self.point = weights, point
        self.tokens = tokens.reshape(-1)
        rows = point.total_new_tokens
        positions = torch.arange(point.context_tokens, point.total_tokens, device=weights.device)
        self._cos, self._sin = rotation(d, positions.repeat(point.batch_size), weights.dtype)
        self._key_slots, self._value_slots = cache.slots(positions)
        self._cache_rows = tuple(cache.rows(layer) for layer in range(d.layers))
        self._hidden = self._empty(rows, d.hidden)
        self._qkv = self._empty(rows, d.qkv_heads, d.head_dim)
        self._rotated = self._empty(rows, d.q_heads + d.kv_heads, d.head_dim)
        self._gate_up = self._empty(rows, 2 * d.ffn)
        self._activated = self._empty(rows, d.ffn)
        self.logits = self._empty(point.batch_size, d.vocab)
        """``[B, V]``: those of the last position of each sequence."""
        self._last_rows = slice(point.new_tokens - 1, None, point.new_tokens)
        self._attention = self._attention_over(cache)

    def run(self) -> None:
        """Compute ``logits``; every tensor that another run would need lies where it lay."""
        torch.index_select(self.weights.embedding, 0, self.tokens, out=self._hidden)
        for index, layer in enumerate(self.weights.layers):
            self._project(layer)
            self._rotate()
            self._store(index)
            attended = self._attention.attend(index)
            torch.addmm(self._hidden, attended, layer.output.t(), out=self._hidden)
            self._add_block(layer)
        last = self._norm(self._hidden, self.weights.final_norm)[self._last_rows]
        torch.mm(last, self.weights.head.t(), out=self.logits)

    def _empty(self, *sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=self.weights.dtype, device=self.weights.device)

    def _attention_over(self, cache: KvCache) -> Attention:
        d, point = self.weights.dimensions, self.point
        queries = self._rotated[:, : d.q_heads]
        tokens = point.total_tokens
        if cache.plan.is_paged:
            gathered = GatheredPages(cache, tokens)
            views, prepare = [gathered.views()] * d.layers, gathered.gather
        else:
            views, prepare = [cache.contiguous_views(layer, tokens) for layer in range(d.layers)], None
        kind = DecodeAttention if point.phase == "decode" else PromptAttention
        return kind(point, queries, views, prepare)

    def _norm(self, values: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return functional.rms_norm(values, values.shape[-1:], weight, self.weights.dimensions.norm_eps)

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
        d, rows = self.weights.dimensions, self._cache_rows[layer]
        rows.index_copy_(0, self._key_slots, self._rotated[:, d.q_heads :])
        rows.index_copy_(0, self._value_slots, self._qkv[:, d.q_heads + d.kv_heads :])

    def _add_block(self, layer: LayerWeights) -> None:
        """The gated block: down(silu(gate) * up), added to the residual stream."""
        normed = self._norm(self._hidden, layer.block_norm)
        torch.mm(normed, layer.gate_up.t(), out=self._gate_up)
        gate, up = self._gate_up.chunk(2, dim=1)
        torch.mul(functional.silu(gate), up, out=self._activated)
        torch.addmm(self._hidden, self._activated, layer.down.t(), out=self._hidden)
