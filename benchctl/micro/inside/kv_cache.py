"""The cache of keys and values: one tensor of pages, which a sequence holds in any order.

A layer is ``[pages, 2, page tokens, Hkv, h]``, keys before values. In the contiguous layout the one page of a
sequence has room for all of its tokens, and attention sees a view of it. In the paged layout the pages of all
sequences lie in random order, as in the pool of an engine that has run for a while, and a pass gathers them first.
"""

import torch

from benchctl.micro.inside.dimensions import Dimensions, KvPlan


class KvCache:
    """Pages of every layer, and the table of those that each sequence holds."""

    def __init__(
        self, dimensions: Dimensions, plan: KvPlan, *, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        """Random contents: attention over zeros would be as fast, but draws less power."""
        self.plan = plan
        generator = torch.Generator(device).manual_seed(seed)
        pages = plan.sequences * plan.pages
        sizes = (dimensions.layers, pages, 2, plan.page_tokens, dimensions.kv_heads, dimensions.head_dim)
        self.pages = torch.empty(sizes, dtype=dtype, device=device).normal_(generator=generator)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        if not plan.is_paged:
            order = torch.arange(pages)
        self.table = order.reshape(plan.sequences, plan.pages).to(device)
        """``[sequences, pages]``: ids of pages, in the order of the tokens that they hold."""

    def slots(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of keys and of values in a layer's ``rows``, for ``positions`` of every sequence in turn."""
        tokens = self.plan.page_tokens
        pages = self.table[:, positions // tokens]
        keys = pages * (2 * tokens) + positions % tokens
        return keys.reshape(-1), (keys + tokens).reshape(-1)

    def rows(self, layer: int) -> torch.Tensor:
        """A layer as ``[rows, Hkv, h]``: one row for a token's keys, one for its values."""
        return self.pages[layer].flatten(0, 2)

    def contiguous_views(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first ``tokens`` of every sequence, ``[B, Hkv, tokens, h]``, without a copy."""
        keys, values = self.pages[layer, :, 0, :tokens], self.pages[layer, :, 1, :tokens]
        return keys.transpose(1, 2), values.transpose(1, 2)
