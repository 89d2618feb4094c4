"""Step time from measured tables of a model's layers: the sum over a forward pass.

    step = once(T) + sum over layers of (linear(T) + attention + experts(T)) + head(R) + collectives

T is the number of tokens that the device computes: those of the step, padded to the next captured graph size where
the engine replays graphs. R is the number of rows, whose logits an engine computes even for a prompt that does not
end in this step. Tables hold the time of kernels alone; the launches of a captured graph, and a scheduler that
plans the next step meanwhile, add nothing to it.

Collectives of a ring of k devices with latency l and bandwidth w, for b bytes: an all-reduce takes 2 (k - 1) hops
of l + b / k / w, an all-gather of shards of b bytes k - 1 hops of l + b / w. A forward pass has two all-reduces of
the hidden states in each layer, one after the embedding, and one gather of the logits.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from benchctl.costs.shapes import ModelShape
from benchctl.errors import UsageError
from benchctl.steptime.layer_tables import AttentionTable, Line, SkewTable
from benchctl.units import US_PER_S

MLP: Final = frozenset({"gate_up_proj", "act_fn", "down_proj"})
"""Layers in whose place some layers of a model have a block of experts."""
_BYTES: Final = 2
"""Bytes of an activation, bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Connection of the devices: latency of a hop and bandwidth in one direction."""

    latency_us: float
    bandwidth_bytes_per_s: float

    def hop_us(self, num_bytes: float) -> float:
        return self.latency_us + num_bytes / self.bandwidth_bytes_per_s * US_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTables:
    """Measured layers of one model on one kind of device, at one degree of tensor parallelism.

    ``dense`` has lines over tokens, ``per_sequence`` over rows, ``experts`` for each number of tokens a line over
    the distinct experts that these choose; times in microseconds. ``verification`` has the attention of decoding
    rows alone, one table for each measured number of query tokens, 1 among them; None where rows of several were
    not measured.
    """

    dense: Mapping[str, Line]
    per_sequence: Mapping[str, Line]
    attention: AttentionTable
    experts: Mapping[float, Line] = field(default_factory=dict)
    skew: SkewTable | None = None
    verification: Mapping[float, AttentionTable] | None = None
    tensor_parallel: int = 1
    link: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The prompts of one step, as one: their number, their new tokens, and what these attend to.

    ``positions`` is the sum of c (k + c / 2) over chunks of c tokens after k cached ones.
    """

    number: int = 0
    tokens: float = 0
    positions: float = 0.0

    @property
    def history(self) -> float:
        """Cached tokens before a single chunk that attends to as many positions."""
        return self.positions / self.tokens - self.tokens / 2 if self.tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRows:
    """The decoding rows of one step: their number, the sum of their contexts, and the least and the greatest."""

    number: int = 0
    context: int = 0
    shortest: int = 0
    longest: int = 0

    @property
    def mean(self) -> float:
        return self.context / self.number if self.number else 0.0


class LayerProfile:
    """The layers of a whole model. ``graph_sizes`` are the captured batch sizes in ascending order, or empty."""

    def __init__(self, tables: LayerTables, shape: ModelShape, graph_sizes: tuple[int, ...] = ()) -> None:
        """Raises UsageError when the link of several devices is unknown, or the time of a model's experts."""
        if tables.tensor_parallel > 1 and tables.link is None:
            raise UsageError(
                f"layer profile at tensor parallelism {tables.tensor_parallel} has no link between the devices; "
                "state link_bw and link_latency in its config.json"
            )
        if shape.moe is not None and not tables.experts:
            raise UsageError(
                f"layer profile of {shape.name}, which has experts, without a moe.csv; measure their blocks, or "
                "name another model"
            )
        self.tables: Final = tables
        self.shape: Final = shape
        self.graph_sizes: Final = graph_sizes
        self.of_tokens_us: Final = cache(self._of_tokens_us)
        """The part that depends on the number of tokens alone: projections, norms, experts, all-reduces."""
        self.of_rows_us: Final = cache(self._of_rows_us)
        """The part that depends on the number of rows alone: logits and sampling."""

    def step_us(self, chunks: Chunks, decodes: DecodingRows, draft_tokens: int = 0) -> float:
        """Time of one step, in which the decoding rows have so many draft tokens besides their newest.

        Each of these is computed by every layer, has logits, and attends as ``_verification_us`` says.
        """
        attention, batch = self.tables.attention, (chunks.tokens, chunks.history, decodes.number)
        attention_us = attention.at(*batch, decodes.mean)
        if share := self.share_of_longest(chunks.tokens, decodes):
            attention_us += share * (attention.at(*batch, decodes.longest) - attention_us)
        if draft_tokens:
            attention_us = self._verification_us(attention_us, chunks, decodes, draft_tokens)
        return (
            self.of_tokens_us(chunks.tokens + decodes.number + draft_tokens)
            + self.of_rows_us(chunks.number + decodes.number + draft_tokens)
            + self.shape.layers * attention_us
        )

    def share_of_longest(self, chunk: float, decodes: DecodingRows) -> float:
        """Part of the way of attention from the time of rows of the mean context to that of the longest."""
        if self.tables.skew is None or decodes.longest <= decodes.shortest:
            return 0.0
        spread = (decodes.mean - decodes.shortest) / (decodes.longest - decodes.shortest)
        return self.tables.skew.share(chunk, decodes.number, spread)

    def _verification_us(self, single_us: float, chunks: Chunks, decodes: DecodingRows, draft_tokens: int) -> float:
        """Attention of one layer with q = K + 1 query tokens of each row; ``single_us`` is that at one.

        Where tables have rows of several query tokens, what these take beyond one is added, on the line through
        all measured q. Without them two other parts of the table bound the time from below. Each row still reads
        its keys and values once, which takes as long as for one query token; and the query tokens of all rows
        attend to as many positions as a chunk of a prompt does, whose time is measured:

            time(q) = max(time(1), chunk of n q tokens that attends to n q (S + q / 2) positions)

        with n rows of S tokens each before the step. A kernel that overlaps reading and arithmetic, and whose tiles
        the few query tokens of a row fill, reaches this bound; others take longer. Rows are taken to be of equal
        length and to have equally many drafts, and a batch of unequal contexts to gain what one of their mean does.
        Neither falls with q: less work never takes longer, whatever the noise of a table says.
        """
        rows, query_tokens = decodes.number, 1 + draft_tokens / decodes.number
        if self.tables.verification is not None:
            line = Line.through(
                (q, table.at(0.0, 0.0, rows, decodes.mean)) for q, table in self.tables.verification.items()
            )
            fewer = [q for q in line.xs if q < query_tokens]
            return single_us + max(line.at(q) for q in (*fewer, query_tokens)) - line.at(1.0)
        before = decodes.mean - query_tokens

        def as_chunk_us(query_tokens: float) -> float:
            tokens = rows * query_tokens
            positions = chunks.positions + tokens * (before + query_tokens / 2)
            both = Chunks(tokens=chunks.tokens + tokens, positions=positions)
            return self.tables.attention.at(both.tokens, both.history, 0.0, 0.0)

        return max(single_us, *map(as_chunk_us, (*range(2, math.ceil(query_tokens)), query_tokens)))

    def _of_tokens_us(self, tokens: float) -> float:
        index = bisect_left(self.graph_sizes, tokens)
        if index < len(self.graph_sizes):
            tokens = self.graph_sizes[index]
        bytes_per_hop = tokens * self.shape.hidden * _BYTES / self.tables.tensor_parallel
        time_us = sum(self._times_run(name) * line.at(tokens) for name, line in self.tables.dense.items())
        return time_us + (self._experts_us(tokens) + (2 * self.shape.layers + 1) * 2 * self._hops_us(bytes_per_hop))

    def _of_rows_us(self, rows: int) -> float:
        shard_bytes = rows * self.shape.vocab * _BYTES / self.tables.tensor_parallel
        return sum(line.at(rows) for line in self.tables.per_sequence.values()) + self._hops_us(shard_bytes)

    def _experts_us(self, tokens: float) -> float:
        """All blocks of experts, with tokens that choose theirs uniformly."""
        moe = self.shape.moe
        if moe is None:
            return 0.0
        num_experts = moe.uniform_experts(float(tokens))
        over_tokens = ((at, line.at(num_experts)) for at, line in self.tables.experts.items())
        return moe.layers * Line.through(over_tokens).at(tokens)

    def _times_run(self, name: str) -> int:
        """Number of times that a forward pass runs a layer."""
        # Layers that a forward pass runs once
        if name in {"embedding", "final_layernorm"}:
            return 1
        # Layers that run before attention and again before the feed-forward block; any other runs once in each
        # layer
        if name == "layernorm":
            return 2 * self.shape.layers
        with_experts = self.shape.moe.layers if self.shape.moe is not None and name in MLP else 0
        return self.shape.layers - with_experts

    def _hops_us(self, num_bytes: float) -> float:
        """Once around the ring: k - 1 hops of so many bytes; nothing on a single device."""
        link = self.tables.link
        return 0.0 if link is None else (self.tables.tensor_parallel - 1) * link.hop_us(num_bytes)


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes for which vLLM captures graphs by default: 1, 2, 4, every 8th to 256, every 16th to 512.

    None is above twice the number of sequences that a batch can have.
    """
    most = min(2 * max_num_seqs, 512)
    return tuple(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= most)
