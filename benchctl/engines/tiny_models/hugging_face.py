"""The JSON files of a Hugging Face model directory.

Keys are those that both older and newer loaders read: ``torch_dtype``, ``rope_theta``, and the generic tokenizer
class, which takes tokenizer.json as it is.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchctl.engines.tiny_models.recipe import Architecture, Recipe
from benchctl.engines.tiny_models.tokenizer import CHAT_TEMPLATE, END, END_ID, PAD, PAD_ID, START

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROPE_THETA: Final = 10_000.0
NORM_EPSILON: Final = 1e-6
_CLASSES: Final[dict[Architecture, str]] = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
_TOKEN_IDS: Final = {"bos_token_id": PAD_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}


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
    _write(directory / "tokenizer_config.json", _tokenizer_config(recipe))
    _write(
        directory / "special_tokens_map.json",
        {"additional_special_tokens": [START], "eos_token": END, "pad_token": PAD},
    )
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")


def model_config(recipe: Recipe) -> dict[str, Any]:
    shape = recipe.shape
    # Qwen2 has no key for the size of a head and a sliding window that must be declined.
    own = {"use_sliding_window": False} if recipe.arch == "qwen2" else {"head_dim": shape.head_dim}
    biases = {} if recipe.arch == "qwen2" else {"attention_bias": False}
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
        **biases,
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


def _tokenizer_config(recipe: Recipe) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.context,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "chat_template": CHAT_TEMPLATE,
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
