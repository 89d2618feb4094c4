"""A prefix cache that is filled once and never learns: the most frequent beginnings of a set of prompts.

It is the cache of llm-mock: a trie of prompts that counts how many pass through each node. The nodes of the
largest counts are kept, from the root on; since counts never grow with depth, no other choice of so many nodes has
more of the prompts' tokens. Ties go to the smaller token: the smaller number of two token ids, the shorter of two
pieces of text, and the first in the alphabet of two as long. How much of a prompt it has is looked up once, on
arrival; a prompt that it has as a whole computes nothing before its first token, where a real engine computes one
token at least.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from benchctl.errors import UsageError
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.reading import DECODING_ERRORS, UnreadableError, decoding_problem, read_lines
from benchctl.workload.datasets.tokens import tokenize


class _Node:
    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[str, _Node] = {}


class StaticPrefixes:
    """The ``num_tokens`` most frequent tokens in a trie of prompts, each reached through the ones before it."""

    def __init__(self, prompts: Iterable[Sequence[str]], num_tokens: int) -> None:
        self._root: Final = _Node()
        for prompt in prompts:
            node = self._root
            for token in prompt:
                node = node.children.setdefault(token, _Node())
                node.count += 1
        self.num_tokens: Final = self._prune(num_tokens)
        """Tokens that are kept."""

    def match(self, prompt: Sequence[str]) -> int:
        """Tokens at the begin of ``prompt`` that the cache has."""
        node = self._root
        for position, token in enumerate(prompt):
            if token not in node.children:
                return position
            node = node.children[token]
        return len(prompt)

    def _prune(self, num_tokens: int) -> int:
        """Leave only the nodes of the largest counts; returns how many those are."""
        edges: list[tuple[int, int, str, int, _Node, _Node]] = []
        newest, num_kept, order = self._root, 0, 0
        while num_kept < num_tokens:
            for token, child in newest.children.items():
                order += 1
                heapq.heappush(edges, (-child.count, len(token), token, order, newest, child))
            newest.children = {}
            if not edges:
                break
            _, _, token, _, parent, newest = heapq.heappop(edges)
            parent.children[token] = newest
            num_kept += 1
        newest.children = {}
        return num_kept


@cache
def static_prefixes(path: str, num_tokens: int) -> StaticPrefixes:
    """The cache of the prompts of a file. Raises UsageError where that is not JSON Lines of prompts."""
    return StaticPrefixes(_prompts(Path(path).expanduser()), num_tokens)


def _prompts(path: Path) -> Iterator[list[str]]:
    decoder = msgspec.json.Decoder(_Row)
    try:
        for number, line in read_lines(path, ROWS_BYTES):
            try:
                yield _tokens(decoder.decode(line))
            except DECODING_ERRORS as error:
                raise UnreadableError(f"{path}:{number}: not a prompt: {decoding_problem(error)}") from error
    except UnreadableError as error:
        raise UsageError(
            f"cached_prompts: {error}; each line is an object with 'prompt', a text or a list of token ids, or "
            "with 'input_tok_ids'"
        ) from error


class _Row(msgspec.Struct, frozen=True):
    prompt: str | list[int] | None = None
    input_tok_ids: list[int] | None = None


def _tokens(row: _Row) -> list[str]:
    prompt = row.prompt if row.input_tok_ids is None else row.input_tok_ids
    if prompt is None:
        raise ValueError("it has neither 'prompt' nor 'input_tok_ids'")
    return list(tokenize(prompt)) if isinstance(prompt, str) else [f"<{token_id}>" for token_id in prompt]
