"""``benchctl models``: make small models of random weights, to try real engines with."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from benchctl.errors import UsageError
from benchctl.formats import megabytes

if TYPE_CHECKING:
    from benchctl.costs.shapes import ModelShape
    from benchctl.engines.tiny_models.recipe import Architecture, Recipe

app = typer.Typer(help="Make models of random weights, to try real engines with.", no_args_is_help=True)

_DEFAULTS = {"hidden": 128, "layers": 2, "heads": 4, "kv-heads": 2, "vocab": 2048}


def _dimension(option: str, what: str) -> typer.models.OptionInfo:
    default = _DEFAULTS.get(option, "2 * hidden")
    info: typer.models.OptionInfo = typer.Option(
        f"--{option}", min=1, metavar="N", help=what, show_default=str(default)
    )
    return info


@app.command("make-tiny")
def make_tiny(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make.")],
    arch: Annotated[Literal["qwen2", "qwen3", "llama"], typer.Option("--arch", help="Family.")] = "qwen2",
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            "--like",
            metavar="MODEL",
            help="All dimensions of a Qwen2.5 name or a directory's config.json.",
        ),
    ] = None,
    hidden: Annotated[int | None, _dimension("hidden", "Width.")] = None,
    layers: Annotated[int | None, _dimension("layers", "Layers.")] = None,
    heads: Annotated[int | None, _dimension("heads", "Query heads.")] = None,
    kv_heads: Annotated[int | None, _dimension("kv-heads", "Key-value heads.")] = None,
    ffn: Annotated[int | None, _dimension("ffn", "Width of the feed-forward block.")] = None,
    vocab: Annotated[int | None, _dimension("vocab", "Tokens of the vocabulary.")] = None,
    context: Annotated[
        int, typer.Option("--context", min=1, metavar="N", help="Longest sequence in tokens.")
    ] = 4096,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option("--dtype", help="Type of the weights.")
    ] = "bfloat16",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the weights; the tokenizer has none.")] = 0,
    gguf: Annotated[bool, typer.Option("--gguf", help="Also write DIR/<name of DIR>.gguf for llama.cpp.")] = False,
    no_weights: Annotated[
        bool, typer.Option("--no-weights", help="Only configuration and tokenizer, for engines that draw weights.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a model directory that exists.")] = False,
    value_model: Annotated[
        bool,
        typer.Option(
            "--value-model", help="A pair for guided decoding: DIR/base, and its value model in DIR/value."
        ),
    ] = False,
    value_layers: Annotated[
        int | None,
        typer.Option(
            "--value-layers", min=1, metavar="N", help="Layers of the value model.", show_default="--layers"
        ),
    ] = None,
    value_shape: Annotated[
        str | None,
        typer.Option(
            "--value-shape",
            metavar="MODEL",
            help="Dimensions of the value model, as --shape; the tokens are DIR/base's.",
        ),
    ] = None,
    constant_value: Annotated[
        float | None,
        typer.Option(
            "--constant-value",
            metavar="V",
            help="Every token has this value, between 0 and 1.",
            show_default="random values",
        ),
    ] = None,
) -> None:
    """Write a causal language model of random weights that vLLM, transformers and llama.cpp load.

    With --value-model two: the model, and a value model that guides it. No network is needed. The same options give
    the same bytes.
    """
    from benchctl.engines.tiny_models.make import make_model
    from benchctl.engines.tiny_models.recipe import Recipe
    from benchctl.engines.tiny_models.value_pair import make_value_pair

    if gguf and no_weights:
        raise UsageError("--gguf and --no-weights contradict each other; a GGUF file is made of weights")
    _refuse_value_options(
        value_model=value_model,
        given={
            "--value-layers": value_layers,
            "--value-shape": value_shape,
            "--constant-value": constant_value,
        },
        gguf=gguf,
    )
    given = {"hidden": hidden, "layers": layers, "heads": heads, "kv-heads": kv_heads, "ffn": ffn, "vocab": vocab}
    recipe = Recipe(
        arch=arch,
        shape=_shape(shape, {option: value for option, value in given.items() if value is not None}, arch),
        context=context,
        dtype=dtype,
        seed=seed,
    )
    if value_model:
        value = replace(recipe, shape=_value_shape(recipe, value_shape, value_layers), seed=seed + 1)
        files = make_value_pair(
            directory, recipe, value, constant=constant_value, weights=not no_weights, replace=force
        )
        made = f"{recipe.shape.num_params() / 1e6:,.2f} + {value.shape.as_value_model().num_params() / 1e6:,.2f}"
    else:
        files = make_model(directory, recipe, weights=not no_weights, gguf=gguf, replace=force)
        made = f"{recipe.shape.num_params() / 1e6:,.2f}"
    num_bytes = sum(path.stat().st_size for path in files)
    weights = f"in {dtype}, seed {seed}" if not no_weights else "that are not written"
    print(f"{directory}: {arch} of {made} M random weights {weights}; {len(files)} files, {megabytes(num_bytes)}")


def _refuse_value_options(*, value_model: bool, given: dict[str, object], gguf: bool) -> None:
    """Raise UsageError for options that say nothing without --value-model, or nothing with it."""
    if value_model and gguf:
        raise UsageError("--gguf and --value-model contradict each other: llama.cpp loads no value model")
    options = [option for option, value in given.items() if value is not None]
    if options and not value_model:
        raise UsageError(f"{', '.join(options)}: describes a value model; add --value-model to make one")
    if given["--value-layers"] is not None and given["--value-shape"] is not None:
        raise UsageError("--value-shape gives all dimensions and does not go with --value-layers; leave one out")


def _value_shape(base: "Recipe", name: str | None, layers: int | None) -> "ModelShape":
    """The base model's dimensions with as many layers, or those of another model with the base model's tokens."""
    if name is not None:
        return replace(_shape(name, {}, base.arch), vocab=base.shape.vocab)
    return replace(base.shape, layers=layers or base.shape.layers)


def _shape(name: str | None, given: dict[str, int], arch: "Architecture") -> "ModelShape":
    """The dimensions that the command line asks for: those of a known model, or one by one."""
    from benchctl.costs.shapes import ModelShape, shape_for

    if name is not None:
        if given:
            options = ", ".join(f"--{option}" for option in given)
            raise UsageError(
                f"--shape gives all dimensions and does not go with {options}; leave one or the other out"
            )
        return replace(shape_for(name), qkv_bias=arch == "qwen2")
    dims = _DEFAULTS | given
    hidden, heads = dims["hidden"], dims["heads"]
    if hidden % heads:
        raise UsageError(f"--hidden {hidden} does not divide among --heads {heads}; choose a multiple of it")
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
    )
