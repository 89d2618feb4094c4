"""The acceptance of a draft, from the stored weights of two models whose next token depends on the last alone.

With p(x | t) of the base and q(x | t) of the draft in float64, a draft after token t is accepted as x with

    M(x | t) = min(p(x | t), q(x | t))                  the draft draws its token at temperature 1
    M(x | t) = p(x | t) for the x of largest q, else 0  it proposes its likeliest token
    M(x | t) = 1 for the x of largest p and q           and the base answers at temperature 0

(Leviathan et al., arXiv 2211.17192), and the first i drafts after t with probability
S_i(t) = sum over x of M(x | t) S_(i-1)(x), S_0 = 1. Where S_i does not depend
on t, it is the law of every step of every text.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.engines.tiny_models.stored_weights import StoredWeights
from benchctl.errors import UsageError

Floats: TypeAlias = npt.NDArray[np.float64]

MAX_VOCAB: Final = 8192
"""Largest vocabulary of which all pairs of tokens are computed: 512 MiB for a matrix."""
_ROWS: Final = 256
_LAST_MATRIX: Final = re.compile(r"\.(o_proj|down_proj)\.weight$")
_Step: TypeAlias = Callable[[Floats], Floats]


class PositionLaw(msgspec.Struct, frozen=True, kw_only=True):
    """Probability that the first i drafts are accepted: its mean over all last tokens, the lowest, the highest."""

    survival: float
    lowest: float
    highest: float


class DraftLaw(msgspec.Struct, frozen=True, kw_only=True):
    """The law of acceptance by position, the first drafted token first, for each way to draft and to sample."""

    vocab: int
    sampled: tuple[PositionLaw, ...]
    """Draft and base sample at temperature 1."""
    greedy_draft: tuple[PositionLaw, ...]
    """The draft proposes its likeliest token, the base samples at temperature 1."""
    temperature_0: tuple[PositionLaw, ...]
    """Both take their likeliest token."""


def draft_law(base: Path, draft: Path, num_drafts: int) -> DraftLaw:
    """The law of the first ``num_drafts`` drafted tokens.

    Raises UsageError for models of which it is not known: whose layers add to what the last token says, of
    different vocabularies, or of more than MAX_VOCAB tokens.
    """
    models = _LastTokenModel(base), _LastTokenModel(draft)
    vocab = models[0].vocab
    if models[1].vocab != vocab:
        raise UsageError(f"{draft}: has {models[1].vocab} tokens and {base} {vocab}; a draft shares the vocabulary")
    require_small(vocab)
    both = np.empty((vocab, vocab))
    proposed_share, proposed, likeliest = np.empty(vocab), np.empty(vocab, np.int64), np.empty(vocab, np.int64)
    for start in range(0, vocab, _ROWS):
        rows = slice(start, min(start + _ROWS, vocab))
        p, q = (model.next_tokens(rows) for model in models)
        both[rows] = np.minimum(p, q)
        likeliest[rows], proposed[rows] = p.argmax(axis=1), q.argmax(axis=1)
        proposed_share[rows] = np.take_along_axis(p, q.argmax(axis=1)[:, None], axis=1)[:, 0]
    agrees = (likeliest == proposed).astype(np.float64)
    return DraftLaw(
        vocab=vocab,
        sampled=_positions(lambda alive: both @ alive, vocab, num_drafts),
        greedy_draft=_positions(lambda alive: proposed_share * alive[proposed], vocab, num_drafts),
        temperature_0=_positions(lambda alive: agrees * alive[proposed], vocab, num_drafts),
    )


def require_small(vocab: int) -> None:
    """Raise UsageError for a vocabulary whose pairs of tokens are too many to compute."""
    if vocab > MAX_VOCAB:
        raise UsageError(
            f"a vocabulary of {vocab} tokens: the law of a draft is computed for {MAX_VOCAB} at most; choose a "
            "smaller one with --vocab"
        )


def _positions(step: _Step, vocab: int, num_drafts: int) -> tuple[PositionLaw, ...]:
    alive, laws = np.ones(vocab), []
    for _ in range(num_drafts):
        alive = step(alive)
        laws.append(
            PositionLaw(survival=float(alive.mean()), lowest=float(alive.min()), highest=float(alive.max()))
        )
    return tuple(laws)


class _LastTokenModel:
    """The distribution of the next token after each last one, from the weights in a model directory."""

    def __init__(self, directory: Path) -> None:
        weights = StoredWeights(directory)
        for name in weights.names:
            if _LAST_MATRIX.search(name) and weights.read(name).any():
                raise UsageError(
                    f"{directory}: {name} is not zero, so that the next token depends on more than the last one "
                    "and its law is not known; make a pair with benchctl models make-tiny --draft"
                )
        embedding = weights.read("model.embed_tokens.weight")
        mean_squares = (embedding**2).mean(axis=1, keepdims=True) + weights.norm_epsilon
        self._states = embedding / np.sqrt(mean_squares) * weights.read("model.norm.weight")
        self._head = weights.read("lm_head.weight") if "lm_head.weight" in weights.names else embedding
        self.vocab = len(embedding)

    def next_tokens(self, last: slice) -> Floats:
        """p(x | t): one row for each last token t."""
        logits = self._states[last] @ self._head.T
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(shares / shares.sum(axis=1, keepdims=True))
