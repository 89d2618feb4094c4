"""Files of data sets and of models may hold anything: the error names the file, and the line where it has lines."""

import json
from functools import partial

import pytest
from support.datasets import first
from support.hostile_files import HOSTILE, WRONG_VALUES, refusal_of, write_hostile

from benchctl.costs.shapes import shape_from_config
from benchctl.engines.hub import context_of, end_tokens_of
from benchctl.engines.vllm_steps import read_description
from benchctl.errors import DatasetError, UsageError
from benchctl.records.record import Message
from benchctl.steptime.model import read_model
from benchctl.workload.chat_template import ChatTemplate
from benchctl.workload.datasets.base import SourceFile
from benchctl.workload.datasets.own import custom_prompts, huggingface_prompts
from benchctl.workload.datasets.published import DATASETS as PUBLISHED, gsm8k_prompts, sharegpt_prompts
from benchctl.workload.tokenizers import Estimate, LocalTokenizer

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


@pytest.mark.parametrize("kind", DATASETS)
def test_a_hostile_data_set_is_named(tmp_path, kind):
    if kind == "hub-parquet":
        pytest.importorskip("pyarrow")
    file, read = DATASETS[kind]
    for name in HOSTILE:
        source = SourceFile(path=write_hostile(tmp_path / name / file, name), kind=kind, dataset=kind)
        refusal = refusal_of(partial(read, source, first(1), Estimate()))
        assert str(source.path) in refusal, name
        assert len(refusal) < 1500, name


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_of_a_model_or_server_is_named_or_left_unread(tmp_path, name):
    for file, read in MODEL_FILES.items():
        write_hostile(tmp_path / file, name)
        assert str(tmp_path) in refusal_of(partial(read, tmp_path)), file
    assert read_description(write_hostile(tmp_path / "server.json", name)) == {}
    path = write_hostile(tmp_path / "template" / "chat_template.jinja", name)
    refusal = refusal_of(lambda: ChatTemplate(path.parent).render(CHAT))
    assert not refusal or str(path) in refusal


def test_a_template_that_cannot_be_rendered_is_named(tmp_path):
    for template in ("{{ (" * 3000, "{% if 1 %}" * 500, "{{ messages.x.y }}", "{{ 1 // 0 }}"):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(UsageError, match=r"chat_template\.jinja: the chat template"):
            ChatTemplate(tmp_path).render(CHAT)


def test_limits_of_a_model_are_whole_numbers_or_unknown(tmp_path):
    for value in (*WRONG_VALUES, 1 << 60):
        config = {"max_position_embeddings": value, "eos_token_id": value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert (context_of(str(tmp_path)), end_tokens_of(str(tmp_path))) == (None, ()), value


GSM8K = {"question": "What is 1 + 1?", "answer": "#### 2"}
ROWS = {
    "custom": {"input_len": 5, "output_len": 5, "timestamp": 1.0, "hash_ids": [1], "gold": "a", "session": "s"},
    "mooncake": {"timestamp": 5, "input_length": 5, "output_length": 5, "hash_ids": [1]},
    "replay": {"input_toks": 2, "output_toks": 2, "arrival_time_ns": 3, "input_tok_ids": [1, 2]},
}


@pytest.mark.parametrize("kind", ROWS)
def test_no_value_in_a_row_ends_in_a_traceback_or_fills_the_memory(tmp_path, kind):
    file, read = DATASETS[kind]
    path = tmp_path / file
    for field in ROWS[kind]:
        for value in (*WRONG_VALUES, 10**12, 1e300, -1e300, 1 << 62):
            path.write_text(json.dumps(ROWS[kind]) + "\n" + json.dumps(ROWS[kind] | {field: value}) + "\n")
            refusal = refusal_of(lambda: read(SourceFile(path=path, kind=kind, dataset=kind), first(2), Estimate()))
            assert not refusal or f"{path}:2: " in refusal, (field, value, refusal)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)
AZURE_HEADER = r":1: the header is .*not 'TIMESTAMP,ContextTokens,GeneratedTokens'"
MESSAGES = [{"role": "user", "content": "Hello"}]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


WRONG_FILES = {
    "custom": [
        ("", " has no rows; a row is a JSON object"),
        *(
            (lines({"prompt": "right"}, row), rf":2: .*{fault}.*; a row is a JSON object with prompt")
            for row, fault in (
                ({}, r"no prompt among its fields \(none\)"),
                ({"promt": "x"}, r"no prompt among its fields promt; did you mean 'prompt'"),
                ({"prompt": "x", "messages": MESSAGES}, "prompt and messages in one row; keep one of them"),
                ({"prompt": 3}, r"Expected `str \| null`, got `int` - at `\$\.prompt`"),
                ({"prompt": ""}, "prompt is empty"),
                ({"messages": []}, "messages is empty"),
                ({"messages": [{"role": "user"}]}, "missing required field `content`"),
                ({"prompt": "x", "output_len": 0}, r"`int` >= 1 - at `\$.output_len`"),
                ({"prompt": "x", "hash_ids": [1]}, "give input_len in place of its text"),
                ({"input_len": 600, "hash_ids": [1, 2, 3]}, "3 hash_ids for 600 tokens, which are 2 of 512"),
                ([], "Expected `object`, got `array`"),
            )
        ),
    ],
    "mooncake": [
        (lines(ROWS["mooncake"], ROWS["mooncake"] | changed), rf":2: .*{fault}.*another format")
        for changed, fault in (
            ({"input_length": 0}, "lengths are 0 and 5 tokens; each must be from 1 to"),
            ({"input_length": 1 << 40}, "input_length"),
            ({"timestamp": -1}, r"Expected `float` >= 0.0 - at `\$.timestamp`"),
            ({"timestamp": 1e13}, "timestamp"),
            ({"input_length": 512, "hash_ids": [1, 2]}, "2 hash_ids for 512 tokens, which are 1 of 512"),
            ({"output_length": None}, "output_length"),
        )
    ],
    "replay": [
        (lines(ROWS["replay"], ROWS["replay"] | changed), rf":2: .*{fault}")
        for changed, fault in (
            ({"output_toks": 0}, "each must be from 1 to"),
            ({"arrival_time_ns": -1}, "before the beginning"),
            ({"input_toks": 3}, "input_toks is 3, but there are 2 input_tok_ids"),
        )
    ],
    "azure": [
        ("", AZURE_HEADER),
        ("a,b\n1,2\n", AZURE_HEADER),
        *(
            (f"{AZURE}{row}\r\n", rf":4: .*{fault}")
            for row, fault in (
                ("yesterday,1,1", "timestamp 'yesterday' is not of the form"),
                ("2023-13-16 18:15:46.1,1,1", "month must be in 1..12"),
                ("2023-11-16 18:15:51.1,one,1", "invalid literal"),
                ("2023-11-16 18:15:51.1,0,1", "each must be from 1 to"),
                ("2023-11-16 18:15:51.1,5", "invalid literal"),
                ("2023-11-16 18:15:51.1,5,5,5", "4 values under 3 names"),
                ("2023-11-16 18:15:45.1,5,5", "before that of the previous row"),
            )
        ),
    ],
    "gsm8k": [
        ('{"question": 3, "answer": "#### 1"}\n', ":1: .*another format"),
        ('{"answer": "#### 1"}\n', ":1: .*another format"),
        (lines(GSM8K) + lines(GSM8K)[:-9], ":2: .*the line begins .*benchctl data fetch"),
        (lines(GSM8K) + "\n" + lines(GSM8K | {"answer": "1"}), ":3: the answer has no gold value after '####'"),
    ],
    "sharegpt": [
        (content, ": .*JSON list of objects.*data fetch sharegpt")
        for content in (
            "[{",
            '{"id": 1}',
            '[{"conversations": [{"value": "x"}]}]',
            '[{"conversations": [{"from": 1}]}]',
        )
    ],
}


@pytest.mark.parametrize("kind", WRONG_FILES)
def test_a_wrong_file_is_named_with_the_line_and_the_remedy(tmp_path, kind):
    file, read = DATASETS[kind]
    path = tmp_path / file
    for content, message in WRONG_FILES[kind]:
        path.write_text(content, encoding="utf-8", newline="")
        with pytest.raises(DatasetError, match=rf"{file}{message}"):
            read(SourceFile(path=path, kind=kind, dataset=kind), first(1), Estimate())


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


def test_every_key_of_a_config_has_its_own_error(tmp_path):
    path = tmp_path / "config.json"
    for key in CONFIG:
        for value in (*WRONG_VALUES, 10**12):
            path.write_text(json.dumps(CONFIG | {key: value}))
            refusal = refusal_of(lambda: shape_from_config(path))
            assert not refusal or str(path) in refusal, (key, value, refusal)
    path.write_text(json.dumps(CONFIG | {"num_hidden_layers": 10**12}))
    with pytest.raises(UsageError, match=r"num_hidden_layers is 1000000000000; it must be .* to 10,000"):
        shape_from_config(path)
