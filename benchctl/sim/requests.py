"""Requests as the core sees them, those of a trace without texts, and the prefix cache that never changes."""

import hashlib
import heapq
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence as Items
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from benchctl.errors import UsageError
from benchctl.guided.params import GuidanceParams
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.files import DECODING_ERRORS, UnreadableError, decoding_problem, read_lines
from benchctl.workload.tokenizers import tokenize


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. ``top_k`` -1 keeps the whole vocabulary."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Temperature 0 is top_k 1: the arg max, which no guidance can change."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenized prompt. ``block_hashes`` stand for its full blocks: equal ones mean equal prefixes."""

    num_tokens: int
    digest: str
    asks_for_box: bool
    block_hashes: Items[Hashable]
    further_hashes: Callable[[Iterable[str]], Items[Hashable]] | None = field(default=None, compare=False)
    """Those of the full blocks that it has more with these tokens behind it; None of a prompt without text."""

    @classmethod
    def of(cls, pieces: Items[str], block_size: int, *, salt: str | None = None) -> "Prompt":
        """The prompt of these tokens; one with a ``salt`` shares blocks with those of the same salt alone."""
        chain = hashlib.blake2b(digest_size=16)
        hashes = _further_blocks(chain, pieces, block_size, salt)
        before, last = chain.copy(), pieces[len(hashes) * block_size :]
        chain.update("\0".join(last).encode())
        return cls(
            num_tokens=len(pieces),
            digest=chain.hexdigest(),
            asks_for_box="\\boxed" in "".join(pieces),
            block_hashes=hashes,
            further_hashes=lambda further: _further_blocks(before.copy(), [*last, *further], block_size, salt),
        )


def _further_blocks(chain: Any, pieces: Items[str], block_size: int, salt: str | None) -> tuple[Hashable, ...]:
    hashes: list[bytes] = []
    for start in range(0, len(pieces) - block_size + 1, block_size):
        chain.update("\0".join(pieces[start : start + block_size]).encode() + b"\1")
        hashes.append(chain.digest())
    return tuple(hashes) if salt is None else tuple((salt, block) for block in hashes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, and ``n`` choices of at most ``max_tokens`` each.

    With ``ignore_eos`` each choice has exactly ``max_tokens``. ``guidance`` is None for an unguided request.
    ``static_tokens`` of the prompt are in a cache that never changes.
    """

    request_id: str
    prompt: Prompt
    max_tokens: int
    n: int = 1
    seed: int = 0
    ignore_eos: bool = False
    sampling: SamplingParams = SamplingParams()
    guidance: GuidanceParams | None = None
    static_tokens: int = 0


class Entry(NamedTuple):
    """A request's place in its phase."""

    request_index: int
    """Index within the load."""
    planned_ns: int
    """Time at which it is due."""
    slot_free_ns: int | None
    """Time at which the slot became free that it waited for; None where it waited for none."""


OUTSIDE: Final = Entry(-1, 0, None)
"""The place of a request that belongs to no phase."""


class CountedRequests(Items[Request]):
    """Request i has ``prompt_tokens[i]`` tokens of its own and an answer of exactly ``output_tokens[i]``.

    Sampling and guidance are those of ``template``. Each is made when it is asked for by its index (no slices): a
    trace of millions needs no objects.
    """

    def __init__(
        self,
        prompt_tokens: Iterable[int],
        output_tokens: Iterable[int],
        prefix: str = "r",
        *,
        template: Request | None = None,
    ) -> None:
        self.sampling = SamplingParams() if template is None else template.sampling
        self.guidance = None if template is None else template.guidance
        self.prompt_tokens = array("q", prompt_tokens)
        self.output_tokens = array("q", output_tokens)
        self._prefix = prefix
        if len(self.prompt_tokens) != len(self.output_tokens):
            raise UsageError(
                f"{len(self.prompt_tokens)} prompt lengths for {len(self.output_tokens)} output lengths; "
                "give one of each for every request"
            )

    @property
    def have_tokens(self) -> bool:
        """True if each has a prompt and an answer of one token at least."""
        return all(min(lengths, default=1) > 0 for lengths in (self.prompt_tokens, self.output_tokens))

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def __getitem__(self, index: Any) -> Any:
        return Request(
            request_id=f"{self._prefix}{index}",
            prompt=_prompt(self.prompt_tokens[index]),
            max_tokens=self.output_tokens[index],
            seed=index,
            ignore_eos=True,
            sampling=self.sampling,
            guidance=self.guidance,
        )


@cache
def _prompt(num_tokens: int) -> Prompt:
    """A prompt without text: all of a length are the same."""
    return Prompt(num_tokens=num_tokens, digest=str(num_tokens), asks_for_box=False, block_hashes=())


class _Node:
    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[str, _Node] = {}


class StaticPrefixes:
    """A prefix cache that is filled once and never learns, that of llm-mock: a trie of prompts with counts.

    The ``num_tokens`` nodes of the largest counts are kept, from the root on; since counts never grow with depth,
    no other choice of so many nodes has more of the prompts' tokens. Ties go to the smaller token: the smaller
    number of two token ids, the shorter of two pieces of text, and the first in the alphabet of two as long. How
    much of a prompt it has is looked up once, on arrival; a prompt that it has as a whole computes nothing before
    its first token, where a real engine computes one token at least.
    """

    def __init__(self, prompts: Iterable[Items[str]], num_tokens: int) -> None:
        self._root: Final = _Node()
        for prompt in prompts:
            node = self._root
            for token in prompt:
                node = node.children.setdefault(token, _Node())
                node.count += 1
        self.num_tokens: Final = self._prune(num_tokens)
        """Tokens that are kept."""

    def match(self, prompt: Items[str]) -> int:
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
