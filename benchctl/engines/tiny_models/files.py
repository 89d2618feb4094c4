"""The files of a model directory: tokenizer, configuration, safetensors, and the same model as GGUF.

* The tokenizer is byte-level BPE of any size, trained on text that benchctl generates. It does not depend on the
  seed of the weights: models of one vocabulary size share their tokens, as a draft or a value model must with its
  base.
* Keys of the configuration are those that both older and newer loaders read: ``torch_dtype``, ``rope_theta``, and
  the generic tokenizer class, which takes tokenizer.json as it is.
* Safetensors are written tensor by tensor: the library of that name wants all tensors in memory at once and has no
  bfloat16 for numpy. The GGUF file for llama.cpp has the very values of the safetensors.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchctl.engines.tiny_models.recipe import (
    BYTES_PER_WEIGHT,
    Architecture,
    Array,
    Recipe,
    TensorSpec,
    WeightType,
    interleave_rotary_rows,
    tensor_specs,
    whole_tensor,
)
from benchctl.errors import UsageError
from benchctl.workload.datasets.made import problems

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = (PAD, START, END)
"""In the order of their ids, from 0."""
PAD_ID: Final = SPECIAL_TOKENS.index(PAD)
END_ID: Final = SPECIAL_TOKENS.index(END)

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

MIN_VOCAB: Final = 256 + len(SPECIAL_TOKENS)
"""Every byte has a token of its own, so that any text can be written."""
MAX_VOCAB: Final = 1_000_000
_SPLIT_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Words, single digits, punctuation and space: how Qwen2 cuts text before merging. Loaders that know a model by its
family put this in place of what the file says, so anything else would be cut differently by different engines."""
_CONSONANTS: Final = "bdfghjklmnprstvwxyz"
_VOWELS: Final = "aeiou"

ROPE_THETA: Final = 10_000.0
NORM_EPSILON: Final = 1e-6
_CLASSES: Final[dict[Architecture, str]] = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
_TOKEN_IDS: Final = {"bos_token_id": PAD_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
_LENGTH_BYTES: Final = 8
_TYPE_NAMES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Of tensors, in safetensors and in GGUF."""
_FILE_TYPE_NAMES: Final = {"bfloat16": "MOSTLY_BF16", "float16": "MOSTLY_F16", "float32": "ALL_F32"}


def train_tokenizer(vocab: int) -> "Tokenizer":
    """A tokenizer of exactly ``vocab`` tokens, the same for the same number; UsageError for one out of range."""
    if not MIN_VOCAB <= vocab <= MAX_VOCAB:
        raise UsageError(
            f"vocab is {vocab}; it must be from {MIN_VOCAB} (256 bytes and {len(SPECIAL_TOKENS)} special tokens) "
            f"to {MAX_VOCAB}"
        )
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(vocab), trainer)
    return tokenizer


def _training_text(vocab: int) -> Iterator[str]:
    """English of word problems, then one invented word for each token.

    Training merges until each word is one token, so as many distinct words as tokens always fill the vocabulary.
    """
    for problem in islice(problems(0), 500):
        yield problem.question
    for number in range(vocab):
        yield f" {_invented_word(number)}"


def _invented_word(number: int) -> str:
    """A word that can be spoken, another one for each number: its digits in syllables."""
    syllables = ""
    rest = number + len(_CONSONANTS) * len(_VOWELS)  # two syllables or more
    while rest:
        rest, digit = divmod(rest, len(_CONSONANTS) * len(_VOWELS))
        syllables += _CONSONANTS[digit // len(_VOWELS)] + _VOWELS[digit % len(_VOWELS)]
    return syllables


def write_model_files(
    directory: Path, recipe: Recipe, tokenizer: "Tokenizer", *, is_value_model: bool = False
) -> None:
    """Write configuration and tokenizer; the weights are files of their own."""
    config = model_config(recipe)
    if is_value_model:
        config["architectures"] = [_CLASSES[recipe.arch].replace("ForCausalLM", "ForLengthValueModel")]
    _write(directory / "config.json", config)
    # No sampling settings: servers would take them for defaults, and each engine has its own way with those.
    _write(directory / "generation_config.json", _TOKEN_IDS)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.context,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "chat_template": CHAT_TEMPLATE,
    }
    _write(directory / "tokenizer_config.json", tokenizer_config)
    special_tokens = {"additional_special_tokens": [START], "eos_token": END, "pad_token": PAD}
    _write(directory / "special_tokens_map.json", special_tokens)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")


def model_config(recipe: Recipe) -> dict[str, Any]:
    shape = recipe.shape
    # Qwen2 has no key for the size of a head and a sliding window that must be declined.
    is_qwen2 = recipe.arch == "qwen2"
    own = {"use_sliding_window": False} if is_qwen2 else {"head_dim": shape.head_dim, "attention_bias": False}
    return {
        "architectures": [_CLASSES[recipe.arch]],
        "model_type": recipe.arch,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        **own,
        "max_position_embeddings": recipe.context,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": NORM_EPSILON,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": recipe.initializer_range,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": recipe.dtype,
        "use_cache": True,
        **_TOKEN_IDS,
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_safetensors(path: Path, recipe: Recipe, specs: Sequence[TensorSpec]) -> None:
    """Write one file of these tensors, in the type and from the seed of the recipe."""
    # Some loaders refuse a file that does not name the framework of its layout.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.size * BYTES_PER_WEIGHT[recipe.dtype]
        header[spec.name] = {
            "dtype": _TYPE_NAMES[recipe.dtype],
            "shape": spec.dims,
            "data_offsets": (start, end),
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)  # so that the weights begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        for spec in specs:
            file.write(whole_tensor(spec, recipe.seed, recipe.dtype).data)


def write_gguf(path: Path, recipe: Recipe, tokenizer: "Tokenizer") -> None:
    """Write the model; memory holds one tensor at a time."""
    import gguf  # noqa: PLC0415 - few models get such a file

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[recipe.arch.upper()], recipe.shape.layers)
    writer = gguf.GGUFWriter(path, recipe.arch)
    try:
        for name, value in _gguf_settings(recipe, tokenizer).items():
            getattr(writer, f"add_{name}")(value)
        for spec in tensor_specs(recipe):
            tensor, dtype = names.get_name(spec.name, try_suffixes=(".weight", ".bias")), _gguf_type(spec, recipe)
            assert tensor is not None  # noqa: S101 - for the type checker
            kind = gguf.GGMLQuantizationType[_TYPE_NAMES[dtype]]
            num_bytes = spec.size * BYTES_PER_WEIGHT[dtype]
            # Its type is what the last argument says; the one before would matter for types that numpy knows.
            writer.add_tensor_info(tensor, spec.dims, np.dtype(np.void), num_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        # The writer's own method ends in ``numpy.tofile``, which reports nothing where the disk has no room.
        (file,) = writer.fout or []
        writer.write_padding(file, file.tell())
        for spec in tensor_specs(recipe):
            values = np.ascontiguousarray(_gguf_values(spec, recipe))
            file.write(values.data)
            writer.write_padding(file, values.nbytes)
    finally:
        writer.close()


def _gguf_settings(recipe: Recipe, tokenizer: "Tokenizer") -> dict[str, Any]:
    """The content of the file beside its weights, by the names of the writer's methods, without their ``add_``."""
    from gguf import LlamaFileType, TokenType  # noqa: PLC0415

    shape, vocab = recipe.shape, tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "name": recipe.name,
        "file_type": LlamaFileType[_FILE_TYPE_NAMES[recipe.dtype]],
        "context_length": recipe.context,
        "vocab_size": shape.vocab,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "block_count": shape.layers,
        "head_count": shape.q_heads,
        "head_count_kv": shape.kv_heads,
        "key_length": shape.head_dim,
        "value_length": shape.head_dim,
        "rope_dimension_count": shape.head_dim,
        "rope_freq_base": ROPE_THETA,
        "layer_norm_rms_eps": NORM_EPSILON,
        "tokenizer_model": "gpt2",  # byte-level BPE; the name below says how text is cut before merging
        "tokenizer_pre": "qwen2",
        "token_list": tokens,
        "token_types": [TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens],
        "token_merges": [" ".join(pair) for pair in merges],
        # llama.cpp would take token 11 for the beginning of a text if none were named.
        "bos_token_id": PAD_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _gguf_values(spec: TensorSpec, recipe: Recipe) -> Array:
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
