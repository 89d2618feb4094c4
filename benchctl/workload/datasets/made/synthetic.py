"""Synthetic prompts of planned lengths: numbers that stand for tokens, until they are written as text."""

from itertools import islice
from typing import Final

from benchctl.errors import ProfileError
from benchctl.profile.model import Length, Workload
from benchctl.workload.datasets.base import MadeDataset, Prompt
from benchctl.workload.seeded import draw_lengths, named_stream

NUMBERS: Final = range(1 << 16)
"""Numbers that stand for tokens; the size of any vocabulary would do."""


def numbers_of_prompt(num_tokens: int, index: int, seed: int) -> tuple[int, ...]:
    """The numbers of a prompt of ``num_tokens`` tokens, its own for each ``index``.

    The first is the index, so that no two prompts share a prefix that a server could cache; the others are drawn
    from a stream of this prompt alone.
    """
    stream = named_stream(seed, f"text:{index}")
    return (index, *stream.choices(NUMBERS, k=num_tokens - 1))


def synthetic_prompts(input_len: Length, num_prompts: int, seed: int) -> tuple[Prompt, ...]:
    """Prompts whose lengths are ``input_len``, in turn from a list, or drawn from the stream ``input-len``."""
    lengths = named_stream(seed, "input-len")
    return tuple(
        Prompt(
            prompt_id=f"synthetic-{i:05d}",
            source=f"synthetic:{i}",
            token_numbers=numbers_of_prompt(num_tokens, i, seed),
        )
        for i, num_tokens in enumerate(islice(draw_lengths(input_len, lengths), num_prompts))
    )


def _make(workload: Workload, seed: int) -> tuple[Prompt, ...]:
    if workload.input_len is None:
        raise ProfileError("workload.input_len is null with dataset synthetic, which needs it; set a length")
    return synthetic_prompts(workload.input_len, workload.num_prompts, seed)


DATASET: Final = MadeDataset(make=_make, needs_input_len=True)
