"""Prompts counted by the tokenizer of the model that a server will have."""

import msgspec
import pytest
from support.servers.real_engines import tiny_model

from benchctl.profile.load import profile_from_plain
from benchctl.records.request import Message
from benchctl.workload.prepare import prepare_requests
from benchctl.workload.prompt_lengths import counted_prompts


@pytest.fixture(name="requests_of")
def _requests_of():
    profile = profile_from_plain(
        {
            "name": "counted",
            "engine": {"kind": "vllm"},
            "workload": {
                "dataset": "synthetic", "input_len": 40, "output_len": 8, "num_prompts": 3,
                "arrival": {"kind": "burst"},
            },
            "variants": {"baseline": {}},
        },
        source="a test",
    )  # fmt: skip
    return prepare_requests(profile).requests


def test_a_model_directory_counts_as_its_server_will(requests_of, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tiny_model(tmp_path)
    counts = counted_prompts(requests_of, str(model))
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    assert counts == tuple(len(tokenizer.encode(request.prompt).ids) for request in requests_of)
    assert all(count > request.prompt_tokens for count, request in zip(counts, requests_of, strict=True))


def test_a_model_that_is_only_a_name_and_chats_are_not_counted(requests_of, tmp_path):
    assert counted_prompts(requests_of, "qwen2.5-7b") is None
    chat = msgspec.structs.replace(requests_of[0], prompt=None, messages=(Message(role="user", content="hello"),))
    assert counted_prompts([chat], str(tiny_model(tmp_path))) is None
