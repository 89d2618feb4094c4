"""Sizes of forward passes: how many tokens and rows a pass is padded to, and which sizes can occur.

The time of a pass on a GPU depends on its tokens. Rounding them to eight sizes between a power of two and the
next wastes at most an eighth, and keeps the sizes of a server so few that each is recorded before its first
request.
"""

from typing import Final

MAX_LAG: Final = 8
"""Tokens that a row may lack before it is extended although nothing of it is scored. More of them, a new prompt
above all, go before in a pass of their own."""
MAX_PREFILL_TOKENS: Final = 4096
"""Tokens of a forward pass over prompts, in all rows."""
MAX_ROW_TOKENS: Final = 512
"""Of these, tokens of one row."""
PROMPT_ROWS: Final = 8
"""Rows of a recorded pass over prompts."""
_MOST_PROMPT_TOKENS: Final = 1024
"""Tokens of the largest such pass; for more, a GPU needs about as long as the host for launching it."""
_PROMPT_BITS: Final = 3
"""Leading bits that remain of the tokens of such a pass: up to a quarter is padding."""
_LEAST_CHUNK: Final = 512
"""Cells that one program of attention reads at least, where there are as many."""
_MOST_CHUNKS: Final = 16
PARTIAL_BYTES: Final = 4
"""Of a partial sum of attention, which is a float32."""
_MOST_PARTIAL_BYTES: Final = 1 << 26
"""Of all partial sums of a pass; one over prompts occupies a GPU without being split into so many."""
_EXACT_BITS: Final = 4
"""Numbers of so many bits are not rounded; of larger ones, so many leading bits remain."""
_LEAST_SPAN: Final = 256
_TOKENS_BESIDE: Final = 2
_LAGGING_ROWS: Final = 4
"""The largest pass that is recorded beforehand has so many missing tokens in each row, and so many rows that lack
``MAX_LAG``."""


def padded_tokens(number: int) -> int:
    """``number`` or up to an eighth more."""
    return _rounded_up(number, _EXACT_BITS)


def _rounded_up(number: int, bits: int) -> int:
    """The next number of which only so many leading bits are set."""
    grain = 1 << max(number.bit_length() - bits, 0)
    return -(-number // grain) * grain


def rows_that_fit(tokens: int, candidates: int) -> int:
    """Most rows of a pass: each has as many candidates, or lacks ``MAX_LAG`` tokens and is only extended."""
    return max(1, tokens // min(candidates, MAX_LAG)) if candidates else tokens


def recorded_sizes(max_rows: int, candidates: int) -> list[int]:
    """The sizes in tokens of all passes of up to ``max_rows`` rows in steady decode, in ascending order."""
    usual = max_rows * (candidates + _TOKENS_BESIDE) + _LAGGING_ROWS * MAX_LAG
    largest = padded_tokens(min(usual, max_rows * (candidates + MAX_LAG)))
    sizes, size = [], min(candidates, MAX_LAG)
    while size <= largest:
        sizes.append(padded_tokens(size))
        size = sizes[-1] + 1
    return sizes


def padded_prompt_tokens(number: int) -> int:
    """``number`` or up to a quarter more."""
    return _rounded_up(number, _PROMPT_BITS)


def recorded_prompt_sizes() -> list[int]:
    """The sizes in tokens of the recorded passes over prompts, in ascending order."""
    sizes, size = [], MAX_LAG + 1
    while size <= _MOST_PROMPT_TOKENS:
        sizes.append(padded_prompt_tokens(size))
        size = sizes[-1] + 1
    return sizes


def spans(cells: int) -> list[int]:
    """Numbers of cells that attention looks at, in ascending order: each four times the one before, then all."""
    reach = _LEAST_SPAN
    sizes = []
    while reach < cells:
        sizes.append(reach)
        reach *= 4
    return [*sizes, cells]


def attention_chunks(cells: int, num_drawn: int) -> tuple[int, int]:
    """Cells that one program of attention reads, a power of two, and the number of such parts of ``cells``.

    ``num_drawn`` are the numbers that attention draws in the pass: tokens * heads * head_dim.
    """
    most = max(1, min(_MOST_CHUNKS, _MOST_PARTIAL_BYTES // (num_drawn * PARTIAL_BYTES)))
    least = -(-cells // most)
    chunk = max(_LEAST_CHUNK, 1 << (least - 1).bit_length())
    return chunk, -(-cells // chunk)
