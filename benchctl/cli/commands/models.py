"""``benchctl models``: small models with random weights, to try real engines with."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from benchctl.cli.options import with_options
from benchctl.cli.screen import say
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.engines.tiny_models.make import (
    adapter_specs,
    make_draft_pair,
    make_lora_pair,
    make_model,
    make_value_pair,
)
from benchctl.engines.tiny_models.recipe import Architecture, Recipe
from benchctl.errors import UsageError
from benchctl.profile.bounds import MAX_CONCURRENCY, MAX_CONTEXT, MAX_LAYERS
from benchctl.units import megabytes

app = typer.Typer(add_completion=False, no_args_is_help=True)

_DEFAULTS: Final = {"hidden": 128, "layers": 2, "heads": 4, "kv-heads": 2, "vocab": 2048}
_LARGEST: Final = {"layers": MAX_LAYERS, "vocab": 1 << 20}
_DEFAULT_RANK: Final = 8
_BELONG: Final = {
    "--value-model": ("a value model", ("--value-layers", "--value-shape", "--constant-value")),
    "--draft": ("a draft", ("--draft-layers",)),
    "--lora": ("an adapter", ("--lora-rank",)),
}
"""The thing that each of these options makes, and the options that say nothing without it."""
_OF_TWO: Final = "{} and {} exclude each other; make two directories"
_EXCLUDED: Final = (
    ("--gguf", "--no-weights", "{} and {} contradict each other; a GGUF file consists of weights"),
    ("--gguf", "--value-model", "{} and {} contradict each other: llama.cpp loads no value model"),
    ("--value-shape", "--value-layers", "{} sets all dimensions and excludes {}; leave one out"),
    ("--draft", "--value-model", _OF_TWO),
    ("--draft", "--gguf", _OF_TWO),
    ("--draft", "--no-weights", _OF_TWO),
    ("--lora", "--value-model", _OF_TWO),
    ("--lora", "--gguf", _OF_TWO),
    ("--lora", "--no-weights", _OF_TWO),
    ("--lora", "--draft", _OF_TWO),
)


def _dimension(option: str, what: str) -> typer.models.OptionInfo:
    default = _DEFAULTS.get(option, "2 * hidden")
    info: typer.models.OptionInfo = typer.Option(
        f"--{option}", min=1, max=_LARGEST.get(option, 1 << 16), metavar="N", help=what, show_default=str(default)
    )
    return info


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Raises UsageError for options that do not go together."""

    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to create.")]
    arch: Annotated[Literal["qwen2", "qwen3", "llama"], typer.Option(help="Model family.")] = "qwen2"
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            "--like",
            metavar="MODEL",
            help="Take all dimensions from a built-in name or a directory's config.json.",
        ),
    ] = None
    hidden: Annotated[int | None, _dimension("hidden", "Width.")] = None
    layers: Annotated[int | None, _dimension("layers", "Number of layers.")] = None
    heads: Annotated[int | None, _dimension("heads", "Number of query heads.")] = None
    kv_heads: Annotated[int | None, _dimension("kv-heads", "Number of key-value heads.")] = None
    ffn: Annotated[int | None, _dimension("ffn", "Width of the feed-forward block.")] = None
    vocab: Annotated[int | None, _dimension("vocab", "Size of the vocabulary.")] = None
    context: Annotated[
        int, typer.Option(min=1, max=MAX_CONTEXT, metavar="N", help="Longest sequence in tokens.")
    ] = 4096
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Data type of the weights.")] = (
        "bfloat16"
    )
    seed: Annotated[int, typer.Option(help="Seed of the weights; the tokenizer does not depend on it.")] = 0
    gguf: Annotated[bool, typer.Option("--gguf", help="Also write DIR/<name of DIR>.gguf for llama.cpp.")] = False
    no_weights: Annotated[
        bool,
        typer.Option(
            "--no-weights", help="Write only configuration and tokenizer, for engines that draw the weights."
        ),
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace a model directory that exists.")] = False
    value_model: Annotated[
        bool,
        typer.Option(
            "--value-model", help="Write a pair for guided decoding: DIR/base, and its value model DIR/value."
        ),
    ] = False
    value_layers: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_LAYERS, metavar="N", help="Layers of the value model.", show_default="--layers"
        ),
    ] = None
    value_shape: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Dimensions of the value model, given as for --shape; its vocabulary is that of DIR/base.",
        ),
    ] = None
    constant_value: Annotated[
        float | None,
        typer.Option(metavar="V", help="Value of every token, between 0 and 1.", show_default="random values"),
    ] = None
    draft: Annotated[
        bool,
        typer.Option(
            "--draft",
            help="Write a pair for speculative decoding: DIR/base, and a draft of its first layers, DIR/draft.",
        ),
    ] = False
    draft_layers: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_LAYERS, metavar="N", help="Layers of the draft.", show_default="1"),
    ] = None
    lora: Annotated[
        bool,
        typer.Option(
            "--lora", help="Write a model DIR/base, and a LoRA adapter for it, DIR/adapter, as PEFT does."
        ),
    ] = False
    lora_rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_CONCURRENCY,
            metavar="R",
            help="Rank of the adapter.",
            show_default=str(_DEFAULT_RANK),
        ),
    ] = None

    def __post_init__(self) -> None:
        values = {f"--{field.name.replace('_', '-')}": getattr(self, field.name) for field in fields(self)}
        given = [option for option, value in values.items() if value is not None and value is not False]
        for flag, (what, options) in _BELONG.items():
            stray = ", ".join(option for option in options if option in given)
            if stray and flag not in given:
                raise UsageError(f"{stray}: only for {what}; add {flag} to make one")
        for one, other, problem in _EXCLUDED:
            if one in given and other in given:
                raise UsageError(problem.format(one, other))

    def recipe(self) -> Recipe:
        """The served model."""
        sizes = {
            "hidden": self.hidden,
            "layers": self.layers,
            "heads": self.heads,
            "kv-heads": self.kv_heads,
            "ffn": self.ffn,
            "vocab": self.vocab,
        }
        dimensions = {option: value for option, value in sizes.items() if value is not None}
        shape = _shape(self.shape, dimensions, self.arch)
        return Recipe(arch=self.arch, shape=shape, context=self.context, dtype=self.dtype, seed=self.seed)


@app.callback()
def models() -> None:
    """Make small models with random weights, to try real engines with."""


@app.command("make-tiny")
@with_options
def make_tiny(options: ModelOptions) -> None:
    """Write a causal language model with random weights that vLLM, transformers and llama.cpp can load.

    With --value-model, write two: the model, and a value model, which steers its sampling (guided decoding). With
    --draft, a model and a draft model of its first layers. With --lora, a model and an adapter of all its linear
    layers. The network is not used. The same options give the same bytes.
    """
    files, num_params = _written(options, options.recipe())
    num_bytes = sum(path.stat().st_size for path in files)
    millions = " + ".join(f"{number / 1e6:,.2f}" for number in num_params)
    weights = "(not written)" if options.no_weights else f"in {options.dtype}, seed {options.seed}"
    content = f"{options.arch} with {millions} M random weights {weights}"
    say(f"{options.directory}: {content}; {len(files)} files, {megabytes(num_bytes)}")


def _written(options: ModelOptions, recipe: Recipe) -> tuple[Sequence[Path], list[int]]:
    """The files of a model, or of a pair, and the number of weights of each."""
    directory, force, shape = options.directory, options.force, recipe.shape
    if options.value_model:
        of_value = replace(shape, layers=options.value_layers or shape.layers)
        if options.value_shape is not None:
            of_value = replace(_shape(options.value_shape, {}, recipe.arch), vocab=shape.vocab)
        value = replace(recipe, shape=of_value, seed=recipe.seed + 1)
        constant, weights = options.constant_value, not options.no_weights
        pair = make_value_pair(directory, recipe, value, constant=constant, weights=weights, replace=force)
        return pair, [shape.num_params(), value.shape.as_value_model().num_params()]
    if options.draft:
        layers = options.draft_layers or 1
        pair = make_draft_pair(directory, recipe, layers, replace=force)
        return pair, [shape.num_params(), replace(shape, layers=layers).num_params()]
    if options.lora:
        rank = options.lora_rank or _DEFAULT_RANK
        pair = make_lora_pair(directory, recipe, rank=rank, replace=force)
        return pair, [shape.num_params(), sum(spec.size for spec in adapter_specs(recipe, rank))]
    files = make_model(directory, recipe, weights=not options.no_weights, gguf=options.gguf, replace=force)
    return files, [shape.num_params()]


def _shape(name: str | None, dimensions: dict[str, int], arch: Architecture) -> ModelShape:
    """The dimensions of another model, or those that are given and the defaults of all others."""
    if name is not None:
        if dimensions:
            options = ", ".join(f"--{option}" for option in dimensions)
            raise UsageError(f"--shape sets all dimensions and excludes {options}; leave out one or the other")
        return replace(shape_for(name), qkv_bias=arch == "qwen2", qk_norm=arch == "qwen3")
    dims = _DEFAULTS | dimensions
    hidden, heads = dims["hidden"], dims["heads"]
    if hidden % heads:
        raise UsageError(f"--hidden {hidden} is not divisible by --heads {heads}; choose a multiple of it")
    return ModelShape(
        name="tiny",
        layers=dims["layers"],
        hidden=hidden,
        q_heads=heads,
        kv_heads=dims["kv-heads"],
        head_dim=hidden // heads,
        ffn=dims.get("ffn", 2 * hidden),
        vocab=dims["vocab"],
        tied_embeddings=True,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
    )
