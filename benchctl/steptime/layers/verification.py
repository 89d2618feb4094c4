"""Attention of decoding rows with several query tokens: a verification has q = K + 1 of them with K drafts.

A table may have batches of decoding rows with q query tokens each (``decode_q_len``). Their time beyond that of one
query token is added, on the line through all measured q:

    time(q) = time(1) + decode(q, rows, context) - decode(1, rows, context)

Without them two other parts of the table bound the time from below. Each row still reads its keys and values once,
which takes as long as for one query token; and the query tokens of all rows attend to as many positions as a chunk
of a prompt does, whose time is measured:

    time(q) = max(time(1), chunk of n q tokens that attends to n q (S + q / 2) positions)

with n rows of S tokens each before the step. A kernel that overlaps reading and arithmetic, and whose tiles the few
query tokens of a row fill, reaches this bound; others take longer. Rows are taken to be of equal length and to have
equally many drafts, and a batch of unequal contexts to gain what one of their mean does.

Neither falls with q: less work never takes longer, whatever the noise of a table says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from benchctl.steptime.layers.attention import AttentionTable
from benchctl.steptime.layers.line import Line


@dataclass(frozen=True, slots=True)
class VerificationTable:
    """Attention of decoding rows alone, one table for each measured number of query tokens, 1 among them."""

    by_query_tokens: Mapping[float, AttentionTable]

    def added_us(self, query_tokens: float, rows: float, context: float) -> float:
        """Time beyond that of one query token, in one layer and microseconds; at least 0."""
        line = Line.through((q, table.at(0.0, 0.0, rows, context)) for q, table in self.by_query_tokens.items())
        fewer = [q for q in line.xs if q < query_tokens]
        return max(line.at(q) for q in (*fewer, query_tokens)) - line.at(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyingRows:
    """The decoding rows of one step beside a chunk: their number, and the mean of their tokens before the step.

    The chunk is that of the prompts, with the positions that it attends to.
    """

    number: int
    before: float
    chunk_tokens: float
    chunk_positions: float


def arithmetic_us(attention: AttentionTable, rows: VerifyingRows, query_tokens: float) -> float:
    """Time of the query tokens of all rows and prompts as one chunk, in one layer and microseconds."""
    fewer = range(2, ceil(query_tokens))
    return max(_as_chunk_us(attention, rows, q) for q in (*fewer, query_tokens))


def _as_chunk_us(attention: AttentionTable, rows: VerifyingRows, query_tokens: float) -> float:
    tokens = rows.number * query_tokens
    chunk = rows.chunk_tokens + tokens
    positions = rows.chunk_positions + tokens * (rows.before + query_tokens / 2)
    return attention.at(chunk, positions / chunk - chunk / 2, 0.0, 0.0)
