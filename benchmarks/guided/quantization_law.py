"""How far the guided law moves when a value model is rounded to bfloat16, and when it is quantised to float8.

Each value model scores the same candidates after the same prefixes; each rule makes a law p' of its values and of
the same base probabilities. Steps of rounding are compared:

    bfloat16         beside float32: the rounding that is usual
    fp8 weights      beside bfloat16: weights of linear maps in float8, as on devices that cannot multiply it
    fp8 all          beside bfloat16: inputs in float8 as well, computed as the GPU's products are defined

    raw max, rms     difference of the head's outputs z, v = sigmoid(z)
    spread           standard deviation of z between the candidates of a prefix, in float32: what guidance acts on
    TV mean, max     total variation distance of p': the share of draws that could come out otherwise
    length           change of the expected remaining length ln(1 - v) / ln(gamma) under p', v always of float32

    python -m benchmarks.guided.quantization_law [--value-model DIR] [--model qwen2.5-0.5b --layers 4]

Without a directory the weights are random, in the dimensions of ``--model``, the head scaled to ``--spread``. They
show the size of rounding errors, not what a trained model loses: that needs its directory, and ``--text`` for
prefixes that mean something to it.
"""

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from benchctl.costs.shapes import shape_for
from benchctl.guided.modes import mode_batch
from benchctl.guided.operations import PLAIN
from benchctl.guided.params import GuidanceParams
from benchctl.guided.value_model.checkpoint import Checkpoint, read_checkpoint
from benchctl.guided.value_model.linear import Product, emulated, weights_alone
from benchctl.guided.value_model.scoring import ScoredRow, Scorer
from benchctl.guided.value_model.value_model import ValueModel, random_tensors

GAMMA: Final = 0.997
BASE_SPREAD: Final = 2.0
"""Standard deviation of the base model's logits, which are drawn."""
RULES: Final = {
    "centered_exp -3": GuidanceParams(mode="centered_exp", value_scale=-3.0, gamma=GAMMA),
    "centered_exp -10": GuidanceParams(mode="centered_exp", value_scale=-10.0, gamma=GAMMA),
    "mul 0.9": GuidanceParams(mode="mul", value_scale=0.9, gamma=GAMMA),
}
BATCH: Final = 16


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Prefixes, the candidates [B, K] after each, and what the base model says of them [B, K]."""

    prefixes: list[list[int]]
    ids: Tensor
    probs: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--value-model", type=Path, help="directory of a value model; random weights without")
    parser.add_argument("--model", default="qwen2.5-0.5b", help="dimensions of random weights")
    parser.add_argument("--layers", type=int, default=4, help="layers of random weights")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens of random weights")
    parser.add_argument("--spread", type=float, default=1.0, help="of random weights, see above")
    parser.add_argument("--text", type=Path, help="text of which prefixes are cut, by the value model's tokenizer")
    parser.add_argument("--prefixes", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="tokens of a prefix")
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    checkpoint = stored(options)
    questions = asked(options, checkpoint.config.vocab_size)
    wanted = raw_values(checkpoint, questions, torch.float32, None)
    if options.value_model is None:
        checkpoint = with_head(checkpoint, options.spread / float(wanted.std(dim=1).mean()))
        wanted = raw_values(checkpoint, questions, torch.float32, None)
    rounded = raw_values(checkpoint, questions, torch.bfloat16, None)
    values = torch.sigmoid(wanted)
    print(
        f"{len(wanted)} prefixes of {options.length} tokens; spread {float(wanted.std(dim=1).mean()):.3f}, ", end=""
    )
    print(f"values from {float(values.min()):.3f} to {float(values.max()):.3f}")
    print("| step | raw max | raw rms | rule | TV mean | TV max | length |\n|---|--:|--:|---|--:|--:|--:|")
    report("bfloat16", rounded, wanted, wanted, questions)
    for name, product in (("fp8 weights", weights_alone), ("fp8 all", emulated)):
        report(name, raw_values(checkpoint, questions, torch.bfloat16, product), rounded, wanted, questions)


def stored(options: argparse.Namespace) -> Checkpoint:
    """In the type of the directory, or random weights in bfloat16, as checkpoints usually are."""
    cpu = torch.device("cpu")
    if options.value_model is not None:
        return read_checkpoint(options.value_model, cpu, None)
    shape = shape_for(options.model)
    family = "qwen3" if "qwen3" in options.model else "qwen2" if shape.qkv_bias else "llama"
    config = AutoConfig.for_model(
        family, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=options.layers,
        num_attention_heads=shape.q_heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=options.vocabulary,
    )  # fmt: skip
    tensors = random_tensors(config, cpu, torch.bfloat16, seed=options.seed)
    return Checkpoint(config=config, tensors=tensors, eos_ids=frozenset())


def with_head(checkpoint: Checkpoint, factor: float) -> Checkpoint:
    """The same model with all outputs of its head multiplied."""
    scaled = {name: tensor * factor for name, tensor in checkpoint.tensors.items() if "v_head.summary" in name}
    return replace(checkpoint, tensors={**checkpoint.tensors, **scaled})


def asked(options: argparse.Namespace, vocabulary: int) -> Questions:
    draw = torch.Generator().manual_seed(options.seed + 1)
    size = (options.prefixes, options.length)
    tokens = torch.randint(vocabulary, size, generator=draw)
    if options.text is not None:
        tokenizer = AutoTokenizer.from_pretrained(options.value_model, local_files_only=True)
        text = tokenizer(options.text.read_text(encoding="utf-8"))["input_ids"]
        if len(text) < options.length + options.prefixes:
            raise SystemExit(f"{options.text}: has {len(text)} tokens; give a longer text, or fewer --prefixes")
        starts = torch.linspace(0, len(text) - options.length, options.prefixes).long()
        tokens = torch.tensor(text)[starts[:, None] + torch.arange(options.length)]
    ids = torch.stack(
        [torch.randperm(vocabulary, generator=draw)[: options.candidates] for _ in range(options.prefixes)]
    )
    logits = BASE_SPREAD * torch.randn(ids.shape, generator=draw, dtype=torch.float64)
    probs = torch.softmax(logits.sort(dim=1, descending=True).values, dim=1)
    return Questions(prefixes=tokens.tolist(), ids=ids, probs=probs)


@torch.no_grad()
def raw_values(checkpoint: Checkpoint, questions: Questions, dtype: torch.dtype, product: Product | None) -> Tensor:
    """Outputs of the head [B, K] in float64."""
    tensors = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors.items()}
    model = ValueModel(Checkpoint(config=checkpoint.config, tensors=tensors, eos_ids=frozenset()), product=product)
    num_tokens, num_candidates = len(questions.prefixes[0]), questions.ids.shape[1]
    scorer = Scorer(model, BATCH, num_tokens + 1, max_candidates=num_candidates)
    parts = []
    for start in range(0, len(questions.prefixes), BATCH):
        rows = [
            ScoredRow(start + number, prefix, num_tokens)
            for number, prefix in enumerate(questions.prefixes[start : start + BATCH])
        ]
        parts.append(scorer.score(rows, questions.ids[start : start + BATCH]))
        scorer.forget(row.key for row in rows)
    return torch.cat(parts).double()


def report(step: str, raw: Tensor, before: Tensor, wanted: Tensor, questions: Questions) -> None:
    """One line for each rule; ``wanted`` are the values in float32."""
    off = raw - before
    lengths = torch.log1p(-torch.sigmoid(wanted)) / math.log(GAMMA)
    for rule, params in RULES.items():
        after, was = (law(each, params, questions) for each in (raw, before))
        distance = (after - was).abs().sum(dim=1) / 2
        expected, expected_before = ((each * lengths).sum(dim=1).mean() for each in (after, was))
        print(
            f"| {step} | {float(off.abs().max()):.4f} | {float(off.square().mean().sqrt()):.4f} | {rule} "
            f"| {float(distance.mean()):.5f} | {float(distance.max()):.5f} "
            f"| {float(expected / expected_before - 1):+.4%} |",
            flush=True,
        )


def law(raw: Tensor, params: GuidanceParams, questions: Questions) -> Tensor:
    """p' [B, K]."""
    num_rows, width = raw.shape
    cpu = raw.device
    modes = mode_batch([params] * num_rows, cpu, [0] * num_rows)
    counts = torch.full((num_rows,), width)
    nothing = torch.zeros(0, dtype=torch.int64)
    mask = torch.ones_like(raw, dtype=torch.bool)
    return PLAIN.tilt_candidates(
        questions.probs, mask, counts, questions.ids, raw, torch.arange(num_rows), nothing, modes.table, modes.rules
    ).exp()


if __name__ == "__main__":
    main()
