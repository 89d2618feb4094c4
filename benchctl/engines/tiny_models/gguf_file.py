"""The same model as one GGUF file for llama.cpp, with the very values of the safetensors."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchctl.engines.tiny_models.hugging_face import NORM_EPSILON, ROPE_THETA
from benchctl.engines.tiny_models.recipe import (
    BYTES_PER_WEIGHT,
    Recipe,
    TensorSpec,
    WeightType,
    gguf_name,
    tensor_specs,
)
from benchctl.engines.tiny_models.tokenizer import CHAT_TEMPLATE, END_ID, PAD_ID, SPECIAL_TOKENS
from benchctl.engines.tiny_models.weights import Array, interleave_rotary_rows, whole_tensor

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from tokenizers import Tokenizer


def write_gguf(path: Path, recipe: Recipe, tokenizer: "Tokenizer") -> None:
    """Write the model; memory holds one tensor at a time."""
    import gguf  # noqa: PLC0415

    writer = gguf.GGUFWriter(path, recipe.arch)
    try:
        _add_dimensions(writer, recipe)
        _add_tokenizer(writer, tokenizer)
        specs = tensor_specs(recipe)
        for spec in specs:
            _announce(writer, spec, recipe)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_tensors(writer, specs, recipe)
    finally:
        writer.close()


def _write_tensors(writer: "GGUFWriter", specs: Sequence[TensorSpec], recipe: Recipe) -> None:
    """Write the values that were announced, each filled up to the alignment.

    The writer's own method ends in ``numpy.tofile``, which reports nothing where the disk has no room for the end.
    """
    (file,) = writer.fout or []
    writer.write_padding(file, file.tell())
    for spec in specs:
        values = np.ascontiguousarray(gguf_values(spec, recipe))
        file.write(values.data)
        writer.write_padding(file, values.nbytes)


def _add_dimensions(writer: "GGUFWriter", recipe: Recipe) -> None:
    from gguf import LlamaFileType  # noqa: PLC0415

    file_types = {
        "bfloat16": LlamaFileType.MOSTLY_BF16,
        "float16": LlamaFileType.MOSTLY_F16,
        "float32": LlamaFileType.ALL_F32,
    }
    shape = recipe.shape
    writer.add_name(recipe.name)
    writer.add_file_type(file_types[recipe.dtype])
    writer.add_context_length(recipe.context)
    writer.add_vocab_size(shape.vocab)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.q_heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)


def _add_tokenizer(writer: "GGUFWriter", tokenizer: "Tokenizer") -> None:
    from gguf import TokenType  # noqa: PLC0415

    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")  # byte-level BPE; the name below says how text is cut before merging
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    # llama.cpp would take token 11 for the beginning of a text if none were named.
    writer.add_bos_token_id(PAD_ID)
    writer.add_eos_token_id(END_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _announce(writer: "GGUFWriter", spec: TensorSpec, recipe: Recipe) -> None:
    """Describe a tensor that follows later."""
    from gguf import GGMLQuantizationType  # noqa: PLC0415

    kinds = {
        "bfloat16": GGMLQuantizationType.BF16,
        "float16": GGMLQuantizationType.F16,
        "float32": GGMLQuantizationType.F32,
    }
    dtype = _gguf_type(spec, recipe)
    num_bytes = spec.size * BYTES_PER_WEIGHT[dtype]
    # Its type is what the last argument says; the one before would matter for types that numpy knows.
    writer.add_tensor_info(gguf_name(spec.name), spec.dims, np.dtype(np.void), num_bytes, raw_dtype=kinds[dtype])


def gguf_values(spec: TensorSpec, recipe: Recipe) -> Array:
    """The values of a tensor as the file holds them.

    Vectors are float32 in every GGUF file; they are rounded to the type of the model first, so that no engine
    computes with other values than another one.
    """
    values = whole_tensor(spec, recipe.seed, recipe.dtype)
    if recipe.arch == "llama" and spec.name.endswith(("q_proj.weight", "k_proj.weight")):
        is_query = spec.name.endswith("q_proj.weight")
        values = interleave_rotary_rows(values, recipe.shape.q_heads if is_query else recipe.shape.kv_heads)
    if _gguf_type(spec, recipe) == recipe.dtype:
        return values
    if recipe.dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _gguf_type(spec: TensorSpec, recipe: Recipe) -> WeightType:
    return "float32" if len(spec.dims) == 1 else recipe.dtype
