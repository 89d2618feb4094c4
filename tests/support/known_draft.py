"""Pairs of a base model and a draft whose acceptance is known in law, to hold servers against.

All tokens of the vocabulary stand on a circle. Attention and feed-forward blocks compute with random weights, and
their last matrix is zero, so that a position's state is the embedding of its token. Token t is embedded as the
waves cos(2 pi k t / V) and sin(2 pi k t / V) of some frequencies k, whose norm is the same for every t; the head
adds them up with strengths a and angles phi:

    logit(x | t) = sum over k of a_k cos(2 pi k (x - t) / V - phi_k)

So p(x | t) = f(x - t): a text is a random walk on the circle, and what two such models of one vocabulary say of a
token differs in the same way after every token. A draft is accepted with probability sum of min(f, g) if it was
drawn, and f at the place of the largest g if it is the draft's likeliest, whatever was accepted before (Leviathan
et al., arXiv 2211.17192).
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchctl.engines.tiny_models.files import train_tokenizer, write_model_files
from benchctl.engines.tiny_models.recipe import Recipe, stream_of, tensor_specs, whole_tensor

LOGIT_SPREAD = 2.3
"""Standard deviation of the logits, that of the other models of random weights."""
LIKELIEST_SHARE = 0.4
"""About the probability of the likeliest token of a model with a peak, as trained models have one."""
LAST_MATRICES = (".o_proj.weight", ".down_proj.weight")


@dataclass(frozen=True, slots=True)
class Waves:
    """The law of one model: ``coefficients`` (a exp(i phi), one for each frequency) of waves around the circle."""

    vocab: int
    frequencies: np.ndarray
    coefficients: np.ndarray

    def logits(self) -> np.ndarray:
        """Logit of the token at distance 0, 1, ... vocab - 1 from the last one."""
        distances = np.arange(self.vocab)[:, None]
        return (np.exp(-1j * self.angles(distances)) * self.coefficients).sum(axis=1).real

    def embedding(self) -> np.ndarray:
        """Tokens x hidden: the waves at each token."""
        angles = self.angles(np.arange(self.vocab)[:, None])
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)

    def head(self) -> np.ndarray:
        """Tokens x hidden: what is multiplied with the normed embedding, sqrt(2) times the waves, to the logits."""
        turned = np.exp(1j * self.angles(np.arange(self.vocab)[:, None])) * self.coefficients.conj()
        return np.concatenate([turned.real, turned.imag], axis=1) / np.sqrt(2)

    def mixed_with(self, other: "Waves", share: float) -> "Waves":
        """The waves of the same frequencies of which ``share`` are the other's: logits change linearly."""
        return replace(self, coefficients=(1 - share) * self.coefficients + share * other.coefficients)

    def angles(self, positions: np.ndarray) -> np.ndarray:
        # Whole turns are dropped as whole numbers, which costs no precision.
        return 2 * np.pi * (positions * self.frequencies % self.vocab) / self.vocab


def draw_waves(vocab: int, hidden: int, seed: int, *, name: str) -> Waves:
    """Random waves of the seed: as many frequencies as ``hidden`` has pairs; ``name`` is that of the law.

    Models of one vocabulary, hidden size and seed share their frequencies, so that they can be mixed.
    """
    count = hidden // 2
    frequencies = stream_of(seed, "waves").integers(1, (vocab + 1) // 2, size=count)
    parts = stream_of(seed, name).standard_normal((2, count))
    return Waves(vocab, frequencies, LOGIT_SPREAD / np.sqrt(count) * (parts[0] + 1j * parts[1]))


def with_peak(waves: Waves, seed: int) -> Waves:
    """The same with one likeliest distance, coprime to the vocabulary: a greedy text visits every token.

    All waves are raised to meet there, to a height that would have LIKELIEST_SHARE of the probability were the
    other logits normal.
    """
    vocab, count = waves.vocab, len(waves.frequencies)
    distances = stream_of(seed, "peak").permutation(np.arange(1, vocab))
    distance = next(int(each) for each in distances if math.gcd(int(each), vocab) == 1)
    height = math.log(vocab * LIKELIEST_SHARE / (1 - LIKELIEST_SHARE)) + LOGIT_SPREAD**2 / 2
    turned = np.exp(2j * np.pi * (distance * waves.frequencies % vocab) / vocab)
    return replace(waves, coefficients=waves.coefficients + height / count * turned)


def make_known_pair(directory: Path, base: Recipe, draft: Recipe, *, acceptance: float) -> None:
    """Write ``directory/base`` and ``directory/draft``, of which drawn drafts are accepted so often; in float32.

    The recipes share vocabulary, hidden size and seed; both models get a head of their own.
    """
    smooth, other = (
        draw_waves(base.shape.vocab, base.shape.hidden, base.seed, name=name) for name in ("base", "draft")
    )
    law = with_peak(smooth, base.seed)
    write_circle_model(directory / "base", base, law)
    write_circle_model(directory / "draft", draft, law.mixed_with(other, share_for(law, other, acceptance)))


def share_for(base: Waves, other: Waves, acceptance: float) -> float:
    """The share of the other's waves at which a drawn draft is accepted with this probability, by bisection."""
    target, low, high = distribution(base.logits()), 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        reached = np.minimum(target, distribution(base.mixed_with(other, middle).logits())).sum()
        low, high = (middle, high) if reached >= acceptance else (low, middle)
    return low


def distribution(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def write_circle_model(directory: Path, recipe: Recipe, waves: Waves) -> None:
    """A model directory whose law are these waves."""
    directory.mkdir(parents=True, exist_ok=True)
    untied = replace(recipe, shape=replace(recipe.shape, tied_embeddings=False))
    write_model_files(directory, untied, train_tokenizer(untied.shape.vocab))
    tensors = {"model.embed_tokens.weight": waves.embedding(), "lm_head.weight": waves.head()}
    for spec in tensor_specs(untied):
        if spec.name.endswith(LAST_MATRICES):
            tensors[spec.name] = np.zeros(spec.dims)
        elif spec.name == "model.norm.weight":
            tensors[spec.name] = np.ones(spec.dims)
        elif spec.name not in tensors:
            tensors[spec.name] = whole_tensor(spec, recipe.seed, "float32")
    single = {name: np.ascontiguousarray(values, np.float32) for name, values in tensors.items()}
    save_file(single, directory / "model.safetensors", {"format": "pt"})
