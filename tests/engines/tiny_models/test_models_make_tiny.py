"""Models of random weights: the same bytes from the same options, in formats that other programs read."""

import json
import resource
import signal
import subprocess
import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
import safetensors
from support.servers.stubborn_engine import wait_until
from tokenizers import Tokenizer

from benchctl.costs.shapes import BUILT_IN_SHAPES, ModelShape, shape_for
from benchctl.engines.tiny_models.files import MIN_VOCAB, train_tokenizer
from benchctl.engines.tiny_models.make import make_model
from benchctl.engines.tiny_models.recipe import (
    Recipe,
    bfloat16_bits,
    interleave_rotary_rows,
    tensor_specs,
    whole_tensor,
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


def benchctl(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchctl", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_same_options_give_the_same_bytes_in_every_process(tmp_path):
    for place in ("a", "b"):
        made = benchctl("models", "make-tiny", tmp_path / place / "tiny", "--hidden", 64, "--gguf", "--seed", 3)
        assert made.returncode == 0, made.stderr
    assert set(contents(tmp_path / "a/tiny")) == {*FILES, "tiny.gguf"}
    assert contents(tmp_path / "a/tiny") == contents(tmp_path / "b/tiny")


def test_another_seed_changes_the_weights_and_leaves_the_tokens(tmp_path):
    make_model(tmp_path / "a", recipe(seed=0))
    make_model(tmp_path / "b", recipe(seed=1))
    a, b = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert {name for name in FILES if a[name] != b[name]} == {"model.safetensors"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_has_the_shape_and_the_parameters_that_benchctl_reads_from_it(tmp_path, arch):
    made = recipe(arch)
    make_model(tmp_path / "tiny", made)
    shape = shape_for(str(tmp_path / "tiny"))
    assert shape == made.shape
    assert sum(spec.size for spec in tensor_specs(made)) == shape.num_params()


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen2.5-7b"])
def test_the_tensors_of_a_published_shape_add_up_to_its_parameters(name):
    made = Recipe(arch="qwen2", shape=BUILT_IN_SHAPES[name], context=4096, dtype="bfloat16", seed=0)
    assert sum(spec.size for spec in tensor_specs(made)) == BUILT_IN_SHAPES[name].num_params()


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32")])
def test_weights_are_read_by_the_library_of_their_format(tmp_path, dtype, name):
    made = recipe(dtype=dtype, tied=False)
    make_model(tmp_path / "tiny", made)
    tensors = dict(safetensors.deserialize((tmp_path / "tiny/model.safetensors").read_bytes()))
    assert {key: tuple(tensor["shape"]) for key, tensor in tensors.items()} == {
        spec.name: spec.dims for spec in tensor_specs(made)
    }
    assert {tensor["dtype"] for tensor in tensors.values()} == {name}


def test_the_header_of_the_weights_covers_the_file_without_gap_or_overlap(tmp_path):
    make_model(tmp_path / "tiny", recipe())
    content = (tmp_path / "tiny/model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    offsets = [entry["data_offsets"] for entry in header.values()]
    assert [start for start, _ in offsets] == [0, *(end for _, end in offsets[:-1])]
    assert 8 + length + offsets[-1][1] == len(content)
    assert length % 8 == 0


def test_a_tensor_has_the_spread_that_was_asked_for():
    spec = replace(tensor_specs(recipe())[0], dims=(5_000, 1_000))
    values = whole_tensor(spec, seed=0, dtype="float32")
    assert values.shape == spec.dims
    assert abs(values.std() / spec.scale - 1) < 0.01
    assert abs(values.mean()) < 0.01 * spec.scale


def test_bfloat16_is_the_nearest_and_a_tie_goes_to_the_even_one():
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000], dtype=np.uint32)
    assert [hex(half) for half in bfloat16_bits(bits.view(np.float32))] == [
        *("0x3f80", "0x3f80", "0x3f82", "0x3f81", "0x3f80", "0xbf82"),
    ]


def rotated(vectors, angles, pairs):
    """Each pair of dimensions turned by its angle."""
    turned = vectors.copy()
    for (i, j), angle in zip(pairs, angles, strict=True):
        turned[:, i] = vectors[:, i] * np.cos(angle) - vectors[:, j] * np.sin(angle)
        turned[:, j] = vectors[:, j] * np.cos(angle) + vectors[:, i] * np.sin(angle)
    return turned


def test_rows_for_llama_cpp_give_the_scores_of_the_rows_that_they_were():
    draw = np.random.default_rng(0)
    heads, size, hidden = 3, 8, 5
    query, key = draw.normal(size=(2, heads * size, hidden))
    state, angles = draw.normal(size=hidden), draw.uniform(size=size // 2)
    halves = [(i, i + size // 2) for i in range(size // 2)]
    neighbours = [(2 * i, 2 * i + 1) for i in range(size // 2)]

    def scores(query, key, pairs):
        q, k = (weight @ state for weight in (query, key))
        return (rotated(q.reshape(heads, size), angles, pairs) * k.reshape(heads, size)).sum(axis=1)

    moved = [interleave_rotary_rows(weight, heads) for weight in (query, key)]
    assert np.allclose(scores(*moved, neighbours), scores(query, key, halves))
    assert not np.allclose(scores(query, key, neighbours), scores(query, key, halves))


@pytest.mark.parametrize("vocab", [MIN_VOCAB, 300, 2048, 12_000])
def test_a_tokenizer_has_exactly_the_tokens_asked_for_and_gives_any_text_back(vocab):
    tokenizer = train_tokenizer(vocab)
    assert tokenizer.get_vocab_size() == vocab
    assert [tokenizer.id_to_token(i) for i in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    for text in (TEXT, "".join(map(chr, range(128)))):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_tokenizer_knows_english_words_and_marks_of_a_chat():
    tokenizer = train_tokenizer(2048)
    assert len(tokenizer.encode("How many apples does Ada buy?").ids) < 12
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_gguf_file_has_the_values_of_the_safetensors(tmp_path, arch, dtype):
    made = recipe(arch, dtype=dtype, tied=False)
    make_model(tmp_path / "tiny", made, gguf=True)
    reader = gguf.GGUFReader(tmp_path / "tiny/tiny.gguf")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    theirs = safetensors.deserialize((tmp_path / "tiny/model.safetensors").read_bytes())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], made.shape.layers)
    assert len(stored) == len(theirs)
    for name, tensor in theirs:
        copy = stored[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        assert list(copy.shape[::-1]) == tensor["shape"]
        values = gguf.dequantize(copy.data, copy.tensor_type).reshape(tensor["shape"])
        original = as_float32(tensor)
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            assert not np.array_equal(values, original)
            values, original = np.sort(values, axis=0), np.sort(original, axis=0)
        assert np.array_equal(values, original), name


def as_float32(tensor):
    data, dims = bytes(tensor["data"]), tensor["shape"]
    if tensor["dtype"] == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(dims)
    return (
        np.frombuffer(data, np.float16 if tensor["dtype"] == "F16" else np.float32).astype(np.float32).reshape(dims)
    )


def test_the_gguf_file_carries_the_tokenizer_and_the_ends_of_texts(tmp_path):
    make_model(tmp_path / "tiny", recipe(), gguf=True)
    fields = gguf.GGUFReader(tmp_path / "tiny/tiny.gguf").fields
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny/tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens == [tokenizer.id_to_token(i) for i in range(400)]
    assert tokens[fields["tokenizer.ggml.eos_token_id"].contents()] == "<|im_end|>"
    config = json.loads((tmp_path / "tiny/tokenizer_config.json").read_text())
    assert fields["tokenizer.chat_template"].contents() == config["chat_template"]


def test_a_directory_with_files_is_replaced_only_when_asked_for(tmp_path):
    directory = tmp_path / "tiny"
    make_model(directory, recipe(seed=0), gguf=True)
    before = contents(directory)
    with pytest.raises(UsageError, match=r"tiny: exists and is not empty; .*--force"):
        make_model(directory, recipe(seed=1))
    assert contents(directory) == before
    make_model(directory, recipe(seed=1), replace=True)
    assert set(contents(directory)) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_directory_that_holds_anything_else_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds thesis\.tex, .* not replaced"):
        make_model(tmp_path, recipe(), replace=True)
    with pytest.raises(UsageError, match="is a file"):
        make_model(tmp_path / "thesis.tex", recipe(), replace=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_model_that_could_not_be_finished_leaves_nothing_behind(tmp_path):
    with pytest.raises(UsageError, match="vocab is 10; it must be from 259"):
        make_model(tmp_path / "tiny", recipe(vocab=10))
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file.*cannot be written \(Not a directory\)"):
        make_model(tmp_path / "file/tiny", recipe())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden", "100", "--heads", "6"], "--hidden 100 is not divisible by --heads 6"),
        (["--heads", "4", "--kv-heads", "3"], "kv_heads must divide q_heads"),
        (["--hidden", "12", "--heads", "4"], "cannot be rotated in pairs"),
        (["--vocab", "100"], "vocab is 100; it must be from 259"),
        (["--gguf", "--no-weights"], "--gguf and --no-weights contradict"),
        (
            ["--shape", "qwen2.5-0.5b", "--layers", "2"],
            "--shape sets all dimensions and excludes --layers",
        ),
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
    ],
)
def test_options_that_make_no_model_are_refused_with_a_remedy(tmp_path, options, message):
    made = benchctl("models", "make-tiny", tmp_path / "tiny", *options)
    assert made.returncode == 2
    assert message in " ".join(made.stderr.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_without_weights_a_directory_has_only_configuration_and_tokenizer(tmp_path):
    made = benchctl("models", "make-tiny", tmp_path / "tiny", "--no-weights")
    assert made.returncode == 0, made.stderr
    assert set(contents(tmp_path / "tiny")) == FILES - {"model.safetensors"}


def test_another_models_configuration_gives_the_shape(tmp_path):
    make_model(tmp_path / "a", recipe("llama", tied=False))
    made = benchctl(
        "models", "make-tiny", tmp_path / "b", "--arch", "qwen2", "--shape", tmp_path / "a", "--no-weights"
    )
    assert made.returncode == 0, made.stderr
    assert shape_for(str(tmp_path / "b")) == replace(recipe("qwen2", tied=False).shape, name="b")


@pytest.mark.parametrize("options", [["--gguf"], ["--value-model"], ["--draft"], ["--lora"]])
def test_a_full_disk_leaves_neither_half_of_a_pair_nor_the_directory_around_it(tmp_path, options):
    made = benchctl("models", "make-tiny", tmp_path / "room/tiny", *options)
    assert made.returncode == 0, made.stderr
    num_bytes = max(path.stat().st_size for path in (tmp_path / "room").rglob("*.*") if path.is_file())
    full = subprocess.run(
        [sys.executable, "-m", "benchctl", "models", "make-tiny", tmp_path / "full/new/tiny", *options],
        capture_output=True,
        text=True,
        check=False,
        # No file may become as large as the largest: what is written last fails in the middle.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes - 1, num_bytes - 1)),
    )
    assert full.returncode == 2, full.stderr
    assert "cannot be written" in full.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["room"]


def test_a_full_disk_leaves_a_pair_that_was_to_be_replaced_as_it_was(tmp_path):
    options = ("models", "make-tiny", "--value-model", tmp_path / "pair", "--hidden", 16)
    assert benchctl(*options).returncode == 0
    before = [contents(tmp_path / "pair" / part) for part in ("base", "value")]
    # The base fits; the value model, which has a second file, does not.
    failing = (
        "import benchctl.engines.tiny_models.make as pair\n"
        "write = pair.write_safetensors\n"
        "def full(path, *given):\n"
        "    if path.name == 'value_head.safetensors': raise OSError(28, 'No space left on device')\n"
        "    write(path, *given)\n"
        "pair.write_safetensors = full\n"
        "from benchctl.cli import main; main()"
    )
    argv = [sys.executable, "-c", failing, *map(str, options), "--force", "--seed", "9"]
    full = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert full.returncode == 2
    assert "No space left on device" in full.stderr
    assert sorted(path.name for path in (tmp_path / "pair").iterdir()) == ["base", "value"]
    assert [contents(tmp_path / "pair" / part) for part in ("base", "value")] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_mid_work_leaves_nothing_behind(tmp_path, number):
    large = ("--hidden", "2048", "--layers", "40", "--value-model")
    argv = [sys.executable, "-m", "benchctl", "models", "make-tiny", tmp_path / "new/tiny", *large]
    made = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until("a file of weights begins", lambda: list((tmp_path / "new").rglob("*.safetensors")))
    made.send_signal(number)
    made.communicate(timeout=30)
    assert made.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_value_model_and_its_base_are_made_as_a_pair_with_one_tokenizer(tmp_path):
    for place in ("a", "b"):
        made = benchctl(
            "models",
            "make-tiny",
            "--value-model",
            tmp_path / place,
            "--value-layers",
            1,
            "--vocab",
            400,
            "--hidden",
            64,
        )
        assert made.returncode == 0, made.stderr
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
    head = dict(safetensors.deserialize(value["value_head.safetensors"]))
    assert {name: tensor["shape"] for name, tensor in head.items()} == {
        "v_head.fc.weight": [64, 64],
        "v_head.fc.bias": [64],
        "v_head.summary.weight": [1, 64],
        "v_head.summary.bias": [1],
    }


def test_a_pair_may_have_the_sizes_of_published_models_and_no_weights(tmp_path):
    make_model(tmp_path / "small", recipe(vocab=300))
    made = benchctl(
        "models", "make-tiny", "--value-model", tmp_path / "pair", "--no-weights", "--vocab", 500,
        "--value-shape", tmp_path / "small", "--dtype", "float32",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    value = shape_for(str(tmp_path / "pair/value"))
    assert (value.hidden, value.q_heads, value.vocab) == (48, 6, 500)
    assert not list((tmp_path / "pair").rglob("*.safetensors"))


def test_a_pair_takes_the_place_of_another_only_when_asked(tmp_path):
    options = ("--vocab", 300, "--hidden", 16, "--layers", 1)
    assert benchctl("models", "make-tiny", "--value-model", tmp_path, *options).returncode == 0
    again = benchctl("models", "make-tiny", "--value-model", tmp_path, *options, "--seed", 5)
    assert again.returncode == 2
    assert "base: exists and is not empty" in " ".join(again.stderr.split())
    before = contents(tmp_path / "value")
    forced = benchctl("models", "make-tiny", "--value-model", tmp_path, *options, "--seed", 5, "--force")
    assert forced.returncode == 0, forced.stderr
    assert contents(tmp_path / "value") != before
