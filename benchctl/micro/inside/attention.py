"""Attention of new tokens to the cache by torch's fused kernel: one path for decodes, one for prompts.

A decode has one new token for each sequence, which sees every position, so that it needs no mask. The query heads
that share a key head are passed as rows of one head: keys and values are read once for a group, and not widened to
one copy for each query head. A prompt needs the causal mask that is aligned to the end of its context.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol

import torch
from torch.nn import functional

from benchctl.micro.inside.dimensions import PassPoint
from benchctl.micro.inside.kv_cache import KvCache

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Both ``[B, Hkv, tokens, h]``."""
_HALVES = (torch.float16, torch.bfloat16)


class Attention(Protocol):
    """Attention of one pass, layer by layer."""

    def attend(self, layer: int) -> torch.Tensor:
        """``[T, Hq h]``: the weighted sums of values for each new token."""


class DecodeAttention:
    """One new token for each sequence."""

    def __init__(
        self,
        point: PassPoint,
        queries: torch.Tensor,
        views: Sequence[KeysValues],
        prepare: Callable[[int], None] | None,
    ) -> None:
        """``queries`` are ``[B, Hq, h]``; ``prepare`` brings a layer's keys and values into its views first."""
        kv_heads = views[0][0].shape[1]
        self._queries = queries.unflatten(1, (kv_heads, -1))
        self._views, self._prepare = views, prepare
        self._rows = point.batch_size

    def attend(self, layer: int) -> torch.Tensor:
        if self._prepare is not None:
            self._prepare(layer)
        keys, values = self._views[layer]
        return functional.scaled_dot_product_attention(self._queries, keys, values).reshape(self._rows, -1)


class PromptAttention:
    """Any number of new tokens for each sequence, by the kernels of prompts."""

    def __init__(
        self,
        point: PassPoint,
        queries: torch.Tensor,
        views: Sequence[KeysValues],
        prepare: Callable[[int], None] | None,
    ) -> None:
        """``queries`` are ``[B n, Hq, h]``, those of one sequence after the other; else as for a decode."""
        self._queries = queries.unflatten(0, (point.batch_size, point.new_tokens)).transpose(1, 2)
        self._views, self._prepare = views, prepare
        self._rows = point.total_new_tokens
        self._is_causal = point.new_tokens > 1 and point.context_tokens == 0
        self._mask = _mask_after_context(point, queries) if point.new_tokens > 1 and point.context_tokens else None
        self._is_grouped = queries.shape[1] != views[0][0].shape[1]

    def attend(self, layer: int) -> torch.Tensor:
        if self._prepare is not None:
            self._prepare(layer)
        keys, values = self._views[layer]
        attended = functional.scaled_dot_product_attention(
            self._queries,
            keys,
            values,
            attn_mask=self._mask,
            is_causal=self._is_causal,
            enable_gqa=self._is_grouped,
        )
        return attended.transpose(1, 2).reshape(self._rows, -1)


def _mask_after_context(point: PassPoint, queries: torch.Tensor) -> torch.Tensor:
    """The causal mask ``[n, c + n]`` of tokens after c cached ones.

    Flash attention, which a CUDA device has for half precision, knows this mask by its name and does not read one.
    """
    new, total = point.new_tokens, point.total_tokens
    if queries.is_cuda and queries.dtype in _HALVES:
        # Imported here alone: it brings torch's compiler with it, seconds of the start of every worker.
        return import_module("torch.nn.attention.bias").causal_lower_right(new, total)
    return torch.ones(new, total, dtype=torch.bool, device=queries.device).tril(point.context_tokens)


class GatheredPages:
    """One buffer into which the pages of a layer are gathered in the order of their tokens."""

    def __init__(self, cache: KvCache, tokens: int) -> None:
        """``tokens`` of every sequence are seen; the rest of the last page is gathered and not attended to."""
        self._pages = cache.pages
        self._ids = cache.table.reshape(-1)
        sizes = (len(self._ids), *cache.pages.shape[3:])
        self._keys, self._values = (cache.pages.new_empty(sizes) for _ in range(2))
        self._shape, self._tokens = cache.table.shape, tokens

    def gather(self, layer: int) -> None:
        torch.index_select(self._pages[layer, :, 0], 0, self._ids, out=self._keys)
        torch.index_select(self._pages[layer, :, 1], 0, self._ids, out=self._values)

    def views(self) -> KeysValues:
        """Keys and values of every sequence in the buffer, ``[B, Hkv, tokens, h]``."""
        keys, values = (
            gathered.unflatten(0, self._shape).flatten(1, 2)[:, : self._tokens].transpose(1, 2)
            for gathered in (self._keys, self._values)
        )
        return keys, values
