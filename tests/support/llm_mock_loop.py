"""llm-mock's engine, restated: its scheduler, with benchctl's static prefix cache.

Sources: dongmingli-Ben/llm-mock at f07dd39. The formula of a step is benchctl's (``mock_step_ns``).
"""

from dataclasses import dataclass

from benchctl.sim.costs.llm_mock import mock_length, mock_step_ns
from benchctl.sim.requests import StaticPrefixes


@dataclass(frozen=True, slots=True)
class Served:
    """A request of a load that was posted at 0; times in ns."""

    output_tokens: int
    first_token_ns: int
    last_token_ns: int
    end_ns: int
    """End of the closing step, which yields no token and streams the last chunk again."""


def serve(prompt_tokens, *, batch_size, cached_tokens=None, first_batch=None):
    """Serve requests in this order, at most ``batch_size`` in a step.

    ``cached_tokens`` are the tokens of each prompt that need not be computed. ``first_batch`` requests have arrived
    when the first step begins, all when it ends; None: all at once.
    """
    cached = cached_tokens or [0] * len(prompt_tokens)
    lengths, computed = list(prompt_tokens), list(cached)
    ends = [tokens + mock_length(tokens) for tokens in prompt_tokens]
    firsts, lasts = [0] * len(lengths), [0] * len(lengths)
    served, pool, now_ns = {}, list(range(len(lengths))), 0
    while pool:
        batch = pool[: batch_size if now_ns or first_batch is None else min(first_batch, batch_size)]
        new = max(lengths[i] - computed[i] for i in batch)
        now_ns += mock_step_ns(len(batch), max(lengths[i] for i in batch), new)
        ended = set()
        for i in batch:
            if lengths[i] == ends[i]:  # the closing step
                served[i] = Served(ends[i] - prompt_tokens[i], firsts[i], lasts[i], now_ns)
                ended.add(i)
                continue
            firsts[i] = firsts[i] or now_ns
            computed[i], lasts[i] = lengths[i], now_ns
            lengths[i] += 1
        pool = [i for i in pool if i not in ended]
    return [served[i] for i in range(len(prompt_tokens))]


def cached_lengths(prompts, sources, size):
    """Tokens of each prompt that a static cache of ``size`` tokens has, made from ``sources``; all as token ids."""
    cache = StaticPrefixes(map(_words, sources), size)
    return [cache.match(_words(prompt)) for prompt in prompts]


def _words(token_ids):
    """Token ids as words of the same order."""
    return [f"{token_id:06d}" for token_id in token_ids]
