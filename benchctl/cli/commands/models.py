"""``benchctl models``: small models with random weights, to try real engines with."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.engines.tiny_models.draft_law import draft_law
from benchctl.engines.tiny_models.draft_pair import make_draft_pair
from benchctl.engines.tiny_models.lora_pair import make_lora_pair, num_adapter_params
from benchctl.engines.tiny_models.make import make_model
from benchctl.engines.tiny_models.recipe import Architecture, Recipe
from benchctl.engines.tiny_models.value_pair import make_value_pair
from benchctl.errors import UsageError
from benchctl.formats import megabytes
from benchctl.profile.choices import MAX_CONCURRENCY, MAX_CONTEXT, MAX_LAYERS
from benchctl.records.files import encode

app = typer.Typer(
    add_completion=False,
    help="Make small models with random weights, to try real engines with.",
    no_args_is_help=True,
)

_DEFAULTS = {"hidden": 128, "layers": 2, "heads": 4, "kv-heads": 2, "vocab": 2048}
_LARGEST = {"layers": MAX_LAYERS, "vocab": 1 << 20}


def _dimension(option: str, what: str) -> typer.models.OptionInfo:
    default = _DEFAULTS.get(option, "2 * hidden")
    info: typer.models.OptionInfo = typer.Option(
        f"--{option}", min=1, max=_LARGEST.get(option, 1 << 16), metavar="N", help=what, show_default=str(default)
    )
    return info


_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory to create.")]
_Arch = Annotated[Literal["qwen2", "qwen3", "llama"], typer.Option("--arch", help="Model family.")]
_Shape = Annotated[
    str | None,
    typer.Option(
        "--shape",
        "--like",
        metavar="MODEL",
        help="Take all dimensions from a built-in name or a directory's config.json.",
    ),
]
_Hidden = Annotated[int | None, _dimension("hidden", "Width.")]
_Layers = Annotated[int | None, _dimension("layers", "Number of layers.")]
_Heads = Annotated[int | None, _dimension("heads", "Number of query heads.")]
_KvHeads = Annotated[int | None, _dimension("kv-heads", "Number of key-value heads.")]
_Ffn = Annotated[int | None, _dimension("ffn", "Width of the feed-forward block.")]
_Vocab = Annotated[int | None, _dimension("vocab", "Size of the vocabulary.")]
_Context = Annotated[
    int, typer.Option("--context", min=1, max=MAX_CONTEXT, metavar="N", help="Longest sequence in tokens.")
]
_Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"], typer.Option("--dtype", help="Data type of the weights.")
]
_Seed = Annotated[int, typer.Option("--seed", help="Seed of the weights; the tokenizer does not depend on it.")]
_Gguf = Annotated[bool, typer.Option("--gguf", help="Also write DIR/<name of DIR>.gguf for llama.cpp.")]
_NoWeights = Annotated[
    bool,
    typer.Option("--no-weights", help="Write only configuration and tokenizer, for engines that draw the weights."),
]
_Force = Annotated[bool, typer.Option("--force", help="Replace a model directory that exists.")]
_ValueModel = Annotated[
    bool,
    typer.Option(
        "--value-model", help="Write a pair for guided decoding: DIR/base, and its value model DIR/value."
    ),
]
_ValueLayers = Annotated[
    int | None,
    typer.Option(
        "--value-layers",
        min=1,
        max=MAX_LAYERS,
        metavar="N",
        help="Layers of the value model.",
        show_default="--layers",
    ),
]
_ValueShape = Annotated[
    str | None,
    typer.Option(
        "--value-shape",
        metavar="MODEL",
        help="Dimensions of the value model, given as for --shape; its vocabulary is that of DIR/base.",
    ),
]
_ConstantValue = Annotated[
    float | None,
    typer.Option(
        "--constant-value",
        metavar="V",
        help="Value of every token, between 0 and 1.",
        show_default="random values",
    ),
]
_Draft = Annotated[
    bool,
    typer.Option(
        "--draft",
        help="Write a pair for speculative decoding whose acceptance is known: DIR/base, and its draft DIR/draft.",
    ),
]
_DraftLayers = Annotated[
    int | None,
    typer.Option(
        "--draft-layers", min=1, max=MAX_LAYERS, metavar="N", help="Layers of the draft.", show_default="--layers"
    ),
]
_DraftAcceptance = Annotated[
    float | None,
    typer.Option(
        "--draft-acceptance",
        metavar="A",
        help="Probability at temperature 1 that a token that the draft draws is accepted.",
        show_default="0.7",
    ),
]
_DEFAULT_ACCEPTANCE = 0.7
_Lora = Annotated[
    bool,
    typer.Option("--lora", help="Write a model DIR/base, and a LoRA adapter for it, DIR/adapter, as PEFT does."),
]
_LoraRank = Annotated[
    int | None,
    typer.Option(
        "--lora-rank", min=1, max=MAX_CONCURRENCY, metavar="R", help="Rank of the adapter.", show_default="8"
    ),
]
_DEFAULT_RANK = 8
_ModelDirectory = Annotated[Path, typer.Argument(metavar="BASE", help="Directory of the served model.")]
_DraftDirectory = Annotated[Path, typer.Argument(metavar="DRAFT", help="Directory of the model that drafts.")]
_DraftTokens = Annotated[
    int, typer.Option("--draft-tokens", min=1, max=32, metavar="K", help="Drafted tokens of a step.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("make-tiny")
def make_tiny(
    directory: _Directory,
    arch: _Arch = "qwen2",
    shape: _Shape = None,
    hidden: _Hidden = None,
    layers: _Layers = None,
    heads: _Heads = None,
    kv_heads: _KvHeads = None,
    ffn: _Ffn = None,
    vocab: _Vocab = None,
    context: _Context = 4096,
    dtype: _Dtype = "bfloat16",
    seed: _Seed = 0,
    gguf: _Gguf = False,
    no_weights: _NoWeights = False,
    force: _Force = False,
    value_model: _ValueModel = False,
    value_layers: _ValueLayers = None,
    value_shape: _ValueShape = None,
    constant_value: _ConstantValue = None,
    draft: _Draft = False,
    draft_layers: _DraftLayers = None,
    draft_acceptance: _DraftAcceptance = None,
    lora: _Lora = False,
    lora_rank: _LoraRank = None,
) -> None:
    """Write a causal language model with random weights that vLLM, transformers and llama.cpp can load.

    With --value-model, write two: the model, and a value model that guides it. With --draft, a model and a draft
    for it, whose next tokens follow a law that is known, and the acceptance that follows from the stored weights.
    With --lora, a model and an adapter of all its linear layers.
    The network is not used. The same options give the same bytes.
    """
    if gguf and no_weights:
        raise UsageError("--gguf and --no-weights contradict each other; a GGUF file consists of weights")
    value_options: dict[str, object] = {
        "--value-layers": value_layers,
        "--value-shape": value_shape,
        "--constant-value": constant_value,
    }
    _refuse_value_options(value_model=value_model, value_options=value_options, gguf=gguf)
    draft_options = {"--draft-layers": draft_layers, "--draft-acceptance": draft_acceptance}
    others = {"--value-model": value_model, "--gguf": gguf, "--no-weights": no_weights}
    _refuse_draft_options(draft=draft, draft_options=draft_options, others=others)
    _refuse_lora_options(lora=lora, rank=lora_rank, others={**others, "--draft": draft})
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv-heads": kv_heads, "ffn": ffn, "vocab": vocab}
    dimensions = {option: value for option, value in sizes.items() if value is not None}
    recipe = Recipe(arch=arch, shape=_shape(shape, dimensions, arch), context=context, dtype=dtype, seed=seed)
    millions = f"{recipe.shape.num_params() / 1e6:,.2f}"
    if value_model:
        value = replace(recipe, shape=_value_shape(recipe, value_shape, value_layers), seed=seed + 1)
        files = make_value_pair(
            directory, recipe, value, constant=constant_value, weights=not no_weights, replace=force
        )
        millions += f" + {value.shape.as_value_model().num_params() / 1e6:,.2f}"
    elif draft:
        drafting = replace(recipe, shape=replace(recipe.shape, layers=draft_layers or recipe.shape.layers))
        share = _DEFAULT_ACCEPTANCE if draft_acceptance is None else draft_acceptance
        files = make_draft_pair(directory, recipe, drafting, acceptance=share, replace=force)
        params = (replace(each.shape, tied_embeddings=False).num_params() for each in (recipe, drafting))
        millions = " + ".join(f"{number / 1e6:,.2f}" for number in params)
    elif lora:
        rank = lora_rank or _DEFAULT_RANK
        files = make_lora_pair(directory, recipe, rank=rank, replace=force)
        millions += f" + {num_adapter_params(recipe, rank) / 1e6:,.2f}"
    else:
        files = make_model(directory, recipe, weights=not no_weights, gguf=gguf, replace=force)
    num_bytes = sum(path.stat().st_size for path in files)
    weights = f"in {dtype}, seed {seed}" if not no_weights else "(not written)"
    content = f"{arch} with {millions} M random weights {weights}"
    print(f"{directory}: {content}; {len(files)} files, {megabytes(num_bytes)}")


@app.command("acceptance")
def acceptance(
    base: _ModelDirectory, draft: _DraftDirectory, draft_tokens: _DraftTokens = 4, as_json: _AsJson = False
) -> None:
    """Compute from the stored weights which drafts are accepted, for a pair that make-tiny --draft wrote.

    A token drawn from the draft's distribution q is accepted with probability sum of min(p, q), p being that of the
    served model; all probabilities are float64, at temperature 1 without top_k and top_p, and at temperature 0.
    """
    law = draft_law(base, draft, draft_tokens)
    if as_json:
        print(encode(law).decode())
        return
    print("probability that the first drafts are all accepted, after any token: mean (lowest to highest)")
    print(f"{'drafts':>6}  {'draft drawn':30}{'likeliest drafted':30}temperature 0")
    for number, laws in enumerate(zip(law.sampled, law.greedy_draft, law.temperature_0, strict=True), start=1):
        cells = (f"{each.survival:.5f} ({each.lowest:.5f} to {each.highest:.5f})" for each in laws)
        print(f"{number:>6}  " + "  ".join(cells))
    means = (1 + sum(each.survival for each in laws) for laws in (law.sampled, law.greedy_draft, law.temperature_0))
    print(f"tokens  {'':2}".rstrip() + "  " + "".join(f"{mean:<30.4f}" for mean in means).rstrip())


def _refuse_draft_options(
    *, draft: bool, draft_options: dict[str, int | float | None], others: dict[str, bool]
) -> None:
    """Raise UsageError for options that have no effect without --draft, or with it."""
    options = [option for option, value in draft_options.items() if value is not None]
    if options and not draft:
        raise UsageError(f"{', '.join(options)}: only for a draft; add --draft to make one")
    excluded = [option for option, is_set in others.items() if is_set]
    if draft and excluded:
        raise UsageError(
            f"--draft and {excluded[0]} exclude each other: the law of a pair is that of its weights; leave one out"
        )


def _refuse_lora_options(*, lora: bool, rank: int | None, others: dict[str, bool]) -> None:
    """Raise UsageError for options that have no effect without --lora, or with it."""
    if rank is not None and not lora:
        raise UsageError("--lora-rank: only for an adapter; add --lora to make one")
    excluded = [option for option, is_set in others.items() if is_set]
    if lora and excluded:
        raise UsageError(f"--lora and {excluded[0]} exclude each other; make two directories")


def _refuse_value_options(*, value_model: bool, value_options: dict[str, object], gguf: bool) -> None:
    """Raise UsageError for options that have no effect without --value-model, or with it."""
    if value_model and gguf:
        raise UsageError("--gguf and --value-model contradict each other: llama.cpp loads no value model")
    options = [option for option, value in value_options.items() if value is not None]
    if options and not value_model:
        raise UsageError(f"{', '.join(options)}: only for a value model; add --value-model to make one")
    if value_options["--value-layers"] is not None and value_options["--value-shape"] is not None:
        raise UsageError("--value-shape sets all dimensions and excludes --value-layers; leave one out")


def _value_shape(base: Recipe, name: str | None, layers: int | None) -> ModelShape:
    """The base model's dimensions with as many layers, or those of another model with the base model's tokens."""
    if name is not None:
        return replace(_shape(name, {}, base.arch), vocab=base.shape.vocab)
    return replace(base.shape, layers=layers or base.shape.layers)


def _shape(name: str | None, dimensions: dict[str, int], arch: Architecture) -> ModelShape:

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
