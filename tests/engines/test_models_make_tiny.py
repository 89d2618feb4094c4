"""Models of random weights: the same bytes from the same options, in formats that other programs read."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import gguf
import numpy as np
import pytest
import safetensors
from support.cli import printed, refusal
from support.waiting import wait_until
from tokenizers import Tokenizer

from benchctl.costs.shapes import BUILT_IN_SHAPES, ModelShape, shape_for
from benchctl.engines.tiny_models import make
from benchctl.engines.tiny_models.files import MIN_VOCAB, train_tokenizer
from benchctl.engines.tiny_models.make import make_draft_pair, make_lora_pair, make_model, make_value_pair
from benchctl.engines.tiny_models.recipe import (
    Recipe,
    interleave_rotary_rows,
    tensor_specs,
)
from benchctl.errors import UsageError

ARCHITECTURES = ["qwen2", "qwen3", "llama"]
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
TEXT = 'Ada buys 12 apples — "für 3 €"\n\n\tand  says: 你好 😀, it\'s\x01 fine'


def recipe(arch="qwen2", *, dtype="bfloat16", seed=0, tied=True, vocab=400):
    shape = ModelShape(
        name="tiny",
        layers=2,
        hidden=48,
        q_heads=6,
        kv_heads=2,
        head_dim=8,
        ffn=80,
        vocab=vocab,
        tied_embeddings=tied,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
    )
    return Recipe(arch=arch, shape=shape, context=256, dtype=dtype, seed=seed)


make_tiny = partial(printed, "models", "make-tiny")


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_same_options_give_the_same_bytes_in_every_process_and_another_seed_other_weights(tmp_path):
    for place, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_tiny(tmp_path / place / "tiny", "--hidden", 64, "--gguf", "--seed", seed)
    a, b, c = (contents(tmp_path / place / "tiny") for place in "abc")
    assert set(a) == {*FILES, "tiny.gguf"}
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {"model.safetensors", "tiny.gguf"}


def test_a_model_has_the_shape_and_the_parameters_that_benchctl_reads_from_it(tmp_path):
    for arch in ARCHITECTURES:
        made = recipe(arch)
        make_model(tmp_path / arch / "tiny", made)
        shape = shape_for(str(tmp_path / arch / "tiny"))
        assert shape == made.shape
        assert sum(spec.size for spec in tensor_specs(made)) == shape.num_params()
    for name in ("qwen2.5-1.5b", "qwen2.5-7b"):
        published = Recipe(arch="qwen2", shape=BUILT_IN_SHAPES[name], context=4096, dtype="bfloat16", seed=0)
        assert sum(spec.size for spec in tensor_specs(published)) == BUILT_IN_SHAPES[name].num_params()


def test_rows_for_llama_cpp_give_the_scores_of_the_rows_that_they_were():
    """llama.cpp turns neighbours where the models turn the two halves of a head."""
    draw = np.random.default_rng(0)
    heads, size, hidden = 3, 8, 5
    weights, state = draw.normal(size=(2, heads * size, hidden)), draw.normal(size=hidden)
    angles = np.exp(1j * draw.uniform(size=size // 2))

    def scores(query, key, pairs):
        q, k = (pairs((weight @ state).reshape(heads, size)) for weight in (query, key))
        return (q * angles * k.conj()).real.sum(axis=1)

    def halves(head):
        return head[:, : size // 2] + 1j * head[:, size // 2 :]

    def neighbours(head):
        return head[:, ::2] + 1j * head[:, 1::2]

    moved = [interleave_rotary_rows(weight, heads) for weight in weights]
    assert np.allclose(scores(*moved, neighbours), scores(*weights, halves))
    assert not np.allclose(scores(*weights, neighbours), scores(*weights, halves))


def test_a_tokenizer_has_exactly_the_tokens_asked_for_and_gives_any_text_back():
    for vocab in (MIN_VOCAB, 300, 2048):
        tokenizer = train_tokenizer(vocab)
        assert tokenizer.get_vocab_size() == vocab
        assert [tokenizer.id_to_token(i) for i in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        for text in (TEXT, "".join(map(chr, range(128)))):
            assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("How many apples does Ada buy?").ids) < 12
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1


@pytest.mark.parametrize(("arch", "dtype"), [("qwen2", "bfloat16"), ("qwen3", "float16"), ("llama", "float32")])
def test_the_gguf_file_has_the_values_of_the_safetensors_the_tokenizer_and_the_ends_of_texts(tmp_path, arch, dtype):
    made = recipe(arch, dtype=dtype, tied=False)
    make_model(tmp_path / "tiny", made, gguf=True)
    reader = gguf.GGUFReader(tmp_path / "tiny/tiny.gguf")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    theirs = safetensors.deserialize((tmp_path / "tiny/model.safetensors").read_bytes())
    assert {name: tuple(tensor["shape"]) for name, tensor in theirs} == {s.name: s.dims for s in tensor_specs(made)}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], made.shape.layers)
    assert len(stored) == len(theirs)
    for name, tensor in theirs:
        copy = stored[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        assert list(copy.shape[::-1]) == tensor["shape"]
        values = gguf.dequantize(copy.data, copy.tensor_type).reshape(tensor["shape"])
        kind = gguf.GGMLQuantizationType[tensor["dtype"]]
        numbers = np.frombuffer(tensor["data"], {"BF16": np.uint8, "F16": np.float16}.get(kind.name, np.float32))
        original = gguf.dequantize(numbers, kind).reshape(tensor["shape"])
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            assert not np.array_equal(values, original)
            values, original = np.sort(values, axis=0), np.sort(original, axis=0)
        assert np.array_equal(values, original), name
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny/tokenizer.json"))
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert tokens == [tokenizer.id_to_token(i) for i in range(400)]
    assert tokens[reader.fields["tokenizer.ggml.eos_token_id"].contents()] == "<|im_end|>"
    config = json.loads((tmp_path / "tiny/tokenizer_config.json").read_text())
    assert reader.fields["tokenizer.chat_template"].contents() == config["chat_template"]
    assert shape_for(str(tmp_path / "tiny/tiny.gguf")) == made.shape, (
        "it is that of the configuration beside the file"
    )


def test_a_directory_that_holds_anything_else_is_never_replaced_and_a_place_without_room_is_named(tmp_path):
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    for place, made, message in (
        (tmp_path, recipe(), r"holds thesis\.tex, .* not replaced"),
        (thesis, recipe(), "is a file"),
        (thesis / "tiny", recipe(), r"thesis\.tex.*cannot be written \(Not a directory\)"),
        (tmp_path / "tiny", recipe(vocab=10), "vocab is 10; it must be from 259"),
    ):
        with pytest.raises(UsageError, match=message):
            make_model(place, made, replace=True)
    assert list(tmp_path.iterdir()) == [thesis]
    assert thesis.read_text() == "years of work"


REFUSED = [
    (["--hidden", "100", "--heads", "6"], "--hidden 100 is not divisible by --heads 6"),
    (["--heads", "4", "--kv-heads", "3"], "kv_heads must divide q_heads"),
    (["--hidden", "12", "--heads", "4"], "cannot be rotated in pairs"),
    (["--vocab", "100"], "vocab is 100; it must be from 259"),
    (["--gguf", "--no-weights"], "--gguf and --no-weights contradict"),
    (["--shape", "qwen2.5-0.5b", "--layers", "2"], "--shape sets all dimensions and excludes --layers"),
    (["--shape", "qwen2.5-0.6b"], "did you mean qwen2.5-0.5b"),
    (["--shape", "lvm-a-b-qwen2.5-0.5b"], "has a value head"),
    (["--shape", "mixtral-8x7b", "--arch", "llama"], "has experts or a latent attention"),
    (["--arch", "gpt2"], "'gpt2' is not one of"),
    (["--value-layers", "1"], "--value-layers: only for a value model; add --value-model"),
    (["--value-model", "--gguf"], "--gguf and --value-model contradict"),
    (["--value-model", "--constant-value", "1"], "must lie strictly between 0"),
    (
        ["--value-model", "--value-layers", "1", "--value-shape", "qwen2.5-0.5b"],
        "excludes --value-layers",
    ),
    (["--draft-layers", "1"], "add --draft"),
    (["--draft", "--draft-layers", "3"], "3 layers of the 2"),
    (["--draft", "--gguf"], "--draft and --gguf exclude each other"),
    (["--draft", "--value-model"], "--draft and --value-model exclude each other"),
    (["--lora", "--draft"], "--lora and --draft exclude each other"),
    (["--lora", "--gguf"], "--lora and --gguf exclude"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_make_no_model_are_refused_with_a_remedy(tmp_path, options, message):
    assert message in " ".join(
        refusal("models", "make-tiny", tmp_path / "tiny", *options).replace("│", " ").split()
    )
    assert list(tmp_path.iterdir()) == []


def test_another_models_configuration_gives_the_shape_of_a_directory_without_weights(tmp_path):
    make_model(tmp_path / "a", recipe("llama", tied=False))
    make_tiny(tmp_path / "b", "--arch", "qwen2", "--shape", tmp_path / "a", "--no-weights")
    assert set(contents(tmp_path / "b")) == FILES - {"model.safetensors"}
    assert shape_for(str(tmp_path / "b")) == replace(recipe("qwen2", tied=False).shape, name="b")


@pytest.mark.parametrize(
    ("write", "last"),
    [
        (partial(make_model, recipe=recipe(), gguf=True), "model.safetensors"),
        (partial(make_value_pair, base=recipe(), value=recipe()), "value_head.safetensors"),
        (partial(make_lora_pair, base=recipe(), rank=4), "adapter_model.safetensors"),
        (partial(make_draft_pair, base=recipe(), layers=1), ".draft.partial/model.safetensors"),
    ],
    ids=["model", "value-model", "lora", "draft"],
)
def test_a_full_disk_leaves_neither_half_of_a_pair_and_what_was_to_be_replaced_as_it_was(
    tmp_path, monkeypatch, write, last
):
    write(tmp_path / "pair")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    written = make.write_safetensors

    def full(path, *given):
        if str(path).endswith(last):
            raise OSError(28, "No space left on device")
        written(path, *given)

    monkeypatch.setattr(make, "write_safetensors", full)
    for name in ("pair", "new/pair"):
        with pytest.raises(UsageError, match="No space left on device"):
            write(tmp_path / name, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_an_interrupt_in_mid_work_leaves_nothing_behind(tmp_path):
    large = ("--hidden", "2048", "--layers", "40", "--value-model")
    argv = [sys.executable, "-m", "benchctl", "models", "make-tiny", tmp_path / "new/tiny", *large]
    made = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until("a file of weights begins", lambda: list((tmp_path / "new").rglob("*.safetensors")))
    made.send_signal(signal.SIGTERM)
    made.communicate(timeout=30)
    assert made.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_value_model_and_its_base_are_made_as_a_pair_with_one_tokenizer(tmp_path):
    options = ("--value-layers", 1, "--vocab", 400, "--hidden", 64)
    for place in ("a", "b"):
        make_tiny(tmp_path / place, "--value-model", *options)
    base, value = contents(tmp_path / "a/base"), contents(tmp_path / "a/value")
    assert (base, value) == (contents(tmp_path / "b/base"), contents(tmp_path / "b/value"))
    assert (set(base), set(value)) == (FILES, {*FILES, "value_head.safetensors"})
    assert base["tokenizer.json"] == value["tokenizer.json"]
    assert json.loads(value["config.json"])["architectures"] == ["Qwen2ForLengthValueModel"]
    shapes = [shape_for(str(tmp_path / "a" / part)) for part in ("base", "value")]
    assert [(shape.layers, shape.hidden, shape.vocab, shape.head) for shape in shapes] == [
        (2, 64, 400, "lm_head"),
        (1, 64, 400, "value_head"),
    ]
    head = tensors_of(tmp_path / "a/value/value_head.safetensors")
    assert {name: tensor["shape"] for name, tensor in head.items()} == {
        "v_head.fc.weight": [64, 64],
        "v_head.fc.bias": [64],
        "v_head.summary.weight": [1, 64],
        "v_head.summary.bias": [1],
    }
    again = ("models", "make-tiny", "--value-model", tmp_path / "a", *options, "--seed", 5)
    assert "base: exists and is not empty" in " ".join(refusal(*again).split())
    printed(*again, "--force")
    assert contents(tmp_path / "a/value") != value


def tensors_of(path):
    return dict(safetensors.deserialize(path.read_bytes()))


def test_a_draft_is_the_first_layers_of_its_base(tmp_path):
    make_tiny(tmp_path, "--draft", "--vocab", 300, "--hidden", 48)
    base, draft = tmp_path / "base", tmp_path / "draft"
    assert (shape_for(str(base)).layers, shape_for(str(draft)).layers) == (2, 1)
    assert contents(base)["tokenizer.json"] == contents(draft)["tokenizer.json"]
    of_base, of_draft = (tensors_of(part / "model.safetensors") for part in (base, draft))
    assert {name: of_base[name] for name in of_draft} == of_draft


def test_a_lora_adapter_has_two_matrices_of_the_rank_that_is_asked_for_in_every_linear_layer(tmp_path):
    pairs = ("pair", "again/pair")
    for name in pairs:
        make_tiny(tmp_path / name, "--lora", "--lora-rank", 4)
    assert contents(tmp_path / "pair/adapter").keys() == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "pair/adapter/adapter_config.json").read_text())
    base = tensors_of(tmp_path / "pair/base/model.safetensors")
    adapter, again = (tensors_of(tmp_path / name / "adapter/adapter_model.safetensors") for name in pairs)
    adapted = {name: tensor["shape"] for name, tensor in base.items() if name.endswith("_proj.weight")}
    assert {name.split(".")[-2] for name in adapted} == set(config["target_modules"])
    assert {name: tensor["shape"] for name, tensor in adapter.items()} == {
        f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight": dims
        for name, (rows, columns) in adapted.items()
        for part, dims in (("A", [4, columns]), ("B", [rows, 4]))
    }
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(tmp_path / "pair/base"))
    assert any(bytes(tensor["data"]).strip(b"\0") for name, tensor in adapter.items() if "lora_B" in name)
    assert adapter == again
