"""Files of data sets and of models may hold anything: the error names the file, and the line where it has lines."""

import json
from pathlib import Path

import pytest
from support.hostile_files import HOSTILE, WRONG_VALUES, refusal_of, write_hostile

from benchctl.costs.shapes import shape_from_config
from benchctl.engines.hub import context_of, end_tokens_of
from benchctl.engines.vllm_steps import read_description
from benchctl.errors import DatasetError, UsageError
from benchctl.records.record import Message
from benchctl.steptime.model import read_model
from benchctl.workload.chat_template import ChatTemplate
from benchctl.workload.datasets.base import Selection, SourceFile
from benchctl.workload.datasets.own import custom_prompts, huggingface_prompts
from benchctl.workload.datasets.published import DATASETS as PUBLISHED
from benchctl.workload.datasets.published import gsm8k_prompts, mooncake_trace, sharegpt_prompts
from benchctl.workload.tokenizers import Estimate, LocalTokenizer

SELECTION = Selection(num_prompts=1, method="first", seed=0)
TWO = Selection(num_prompts=2, method="first", seed=0)
DATASETS = {
    "custom": ("rows.jsonl", custom_prompts),
    "gsm8k": ("rows.jsonl", gsm8k_prompts),
    "mooncake": ("rows.jsonl", PUBLISHED["mooncake"].read),
    "replay": ("rows.jsonl", PUBLISHED["sharegpt-replay"].read),
    "sharegpt": ("rows.json", sharegpt_prompts),
    "azure": ("rows.csv", PUBLISHED["azure-trace"].read),
    "hub-jsonl": ("rows.jsonl", huggingface_prompts),
    "hub-json": ("rows.json", huggingface_prompts),
    "hub-csv": ("rows.csv", huggingface_prompts),
    "hub-parquet": ("rows.parquet", huggingface_prompts),
}
MODEL_FILES = {
    "config.json": lambda folder: shape_from_config(folder / "config.json"),
    "model.json": lambda folder: read_model(folder / "model.json"),
    "tokenizer.json": LocalTokenizer,
    "tokenizer_config.json": ChatTemplate,
}
CHAT = (Message(role="user", content="What is 1 + 2?"),)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", DATASETS)
def test_a_hostile_data_set_is_named(tmp_path: Path, kind: str, name: str) -> None:
    if kind == "hub-parquet":
        pytest.importorskip("pyarrow")
    file, read = DATASETS[kind]
    path = write_hostile(tmp_path / file, name)
    refusal = refusal_of(lambda: read(SourceFile(path=path, kind=kind, dataset=kind), SELECTION, Estimate()))
    assert str(path) in refusal
    assert len(refusal) < 1500


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("file", MODEL_FILES)
def test_a_hostile_file_of_a_model_is_named(tmp_path: Path, file: str, name: str) -> None:
    write_hostile(tmp_path / file, name)
    assert str(tmp_path) in refusal_of(lambda: MODEL_FILES[file](tmp_path))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_chat_template_is_named_or_rendered(tmp_path: Path, name: str) -> None:
    path = write_hostile(tmp_path / "chat_template.jinja", name)
    refusal = refusal_of(lambda: ChatTemplate(tmp_path).render(CHAT))
    assert not refusal or str(path) in refusal


@pytest.mark.parametrize("template", ["{{ (" * 3000, "{% if 1 %}" * 500, "{{ messages.x.y }}", "{{ 1 // 0 }}"])
def test_a_template_that_cannot_be_rendered_is_named(tmp_path: Path, template: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UsageError, match=r"chat_template\.jinja: the chat template"):
        ChatTemplate(tmp_path).render(CHAT)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_description_of_a_server_is_none(tmp_path: Path, name: str) -> None:
    assert read_description(write_hostile(tmp_path / "server.json", name)) == {}


@pytest.mark.parametrize("value", [*WRONG_VALUES, 1 << 60])
def test_limits_of_a_model_are_whole_numbers_or_unknown(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": value, "eos_token_id": value}))
    assert context_of(str(tmp_path)) is None
    assert end_tokens_of(str(tmp_path)) == ()


ROWS = {
    "custom": {"input_len": 5, "output_len": 5, "timestamp": 1.0, "hash_ids": [1], "gold": "a", "session": "s"},
    "mooncake": {"timestamp": 5, "input_length": 5, "output_length": 5, "hash_ids": [1]},
    "replay": {"input_toks": 2, "output_toks": 2, "arrival_time_ns": 3, "input_tok_ids": [1, 2]},
}


@pytest.mark.parametrize("kind", ROWS)
def test_no_value_in_a_row_ends_in_a_traceback_or_fills_the_memory(tmp_path: Path, kind: str) -> None:
    file, read = DATASETS[kind]
    path = tmp_path / file
    for field in ROWS[kind]:
        for value in (*WRONG_VALUES, 10**12, 1e300, -1e300, 1 << 62):
            path.write_text(json.dumps(ROWS[kind]) + "\n" + json.dumps(ROWS[kind] | {field: value}) + "\n")
            refusal = refusal_of(lambda: read(SourceFile(path=path, kind=kind, dataset=kind), TWO, Estimate()))
            assert not refusal or f"{path}:2: " in refusal, (field, value, refusal)


def test_lengths_and_times_have_bounds(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for field, value in (("input_length", 1 << 40), ("timestamp", 1e13)):
        path.write_text(json.dumps(ROWS["mooncake"] | {field: value}))
        with pytest.raises(DatasetError, match=rf"rows\.jsonl:1: .*{field}"):
            mooncake_trace(SourceFile(path=path, kind="mooncake", dataset="mooncake"))


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "layer_types": ["full_attention"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "vocab_size": 100,
    "tie_word_embeddings": True,
    "quantization_config": {"quant_method": "fp8"},
}


def test_every_key_of_a_config_has_its_own_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for key in CONFIG:
        for value in (*WRONG_VALUES, 10**12):
            path.write_text(json.dumps(CONFIG | {key: value}))
            refusal = refusal_of(lambda: shape_from_config(path))
            assert not refusal or str(path) in refusal, (key, value, refusal)
    path.write_text(json.dumps(CONFIG | {"num_hidden_layers": 10**12}))
    with pytest.raises(UsageError, match=r"num_hidden_layers is 1000000000000; it must be .* to 10,000"):
        shape_from_config(path)
