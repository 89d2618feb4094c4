"""The prepared request set: bytes, ids, seeds, lengths, arrivals, and the loud stand-in for a missing dataset."""

import hashlib
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from support.prepared import prepare, profile_of
from support.tokenizer_kinds import byte_level

from benchctl.errors import DatasetError, ProfileError
from benchctl.records.record import PreparedRequest
from benchctl.workload.datasets.base import FileDataset, names_of_datasets
from benchctl.workload.prepare import prepare_requests
from benchctl.workload.seeded import distinct_seeds, named_stream

MIXED = {
    "dataset": "synthetic",
    "num_prompts": 12,
    "samples_per_prompt": 3,
    "samples_as": "requests",
    "input_len": {"mean": 30.0, "cv": 0.4},
    "output_len": {"mean": 20.0, "cv": 0.4},
    "arrival": {"kind": "gamma", "request_rate": 5.0, "burstiness": 0.7},
}
MIXED_SHA256 = "dae35b7ee288b27575553802e6a93a2c8c08830cc4677f524906d92b2af67cf9"


def test_the_content_is_the_requests_and_the_hash_is_of_the_content():
    prepared = prepare({"num_prompts": 50})
    lines = prepared.content.splitlines(keepends=True)
    assert tuple(msgspec.json.decode(line, type=PreparedRequest) for line in lines) == prepared.requests
    assert all(line.endswith(b"\n") for line in lines)
    assert [request.index for request in prepared.requests] == list(range(50))
    assert prepared.sha256 == hashlib.sha256(prepared.content).hexdigest()
    assert prepared.sha256 == "a779bfc5385398ea97886d725e107eb9faefd37aa20d895e00f2b5df4ff48da8"
    assert prepare({"num_prompts": 50}, seed=8).sha256 != prepared.sha256


def test_the_bytes_do_not_depend_on_the_machine_the_process_or_where_it_runs(tmp_path):
    assert prepare(MIXED, stop="forced").sha256 == MIXED_SHA256
    script = (
        "import sys; from benchctl.profile.model import Profile; from benchctl.workload.prepare import *;"
        "print(prepare_requests(Profile.model_validate_json(sys.argv[1])).sha256)"
    )
    argv = [sys.executable, "-c", script, profile_of(MIXED, stop="forced").model_dump_json()]
    environment = os.environ | {"PYTHONHASHSEED": "1", "BENCHCTL_DATA_DIR": str(tmp_path)}
    assert subprocess.check_output(argv, cwd=tmp_path, env=environment, text=True).strip() == MIXED_SHA256


def test_neither_paths_nor_the_name_of_the_machine_go_in(tmp_path):
    contents = []
    for name in ("mine.jsonl", "moved.jsonl"):
        (tmp_path / name).write_text('{"question": "q", "answer": "#### 1"}\n')
        prepared = prepare({"dataset": "gsm8k", "path": str(tmp_path / name), "num_prompts": 1})
        contents.append(prepared.content)
    assert contents[0] == contents[1]
    assert str(tmp_path).encode() not in contents[0]


def test_more_prompts_extend_the_same_set_and_forced_samples_of_a_prompt_have_one_length():
    prepared = prepare(MIXED, stop="forced")
    assert prepared.content.startswith(prepare(MIXED | {"num_prompts": 4}, stop="forced").content)
    lengths = [request.max_tokens for request in prepared.requests]
    assert lengths[::3] == lengths[1::3] == lengths[2::3]
    assert len(set(lengths)) > 3
    assert all(request.ignore_eos for request in prepared.requests)


def test_samples_are_choices_of_one_request_or_requests_with_their_own_ids_and_seeds():
    prepared = prepare({"samples_per_prompt": 4, "max_tokens": 77, "output_len": 5})
    assert [request.request_id for request in prepared.requests] == [f"generated-{i:05d}" for i in range(3)]
    limits = {(request.n, request.max_tokens, request.ignore_eos) for request in prepared.requests}
    assert limits == {(4, 77, False)}  # a natural stop limits every output alike
    requests = prepare({"samples_per_prompt": 4, "samples_as": "requests"}).requests
    assert [request.request_id for request in requests[:5]] == [
        "generated-00000-s00",
        "generated-00000-s01",
        "generated-00000-s02",
        "generated-00000-s03",
        "generated-00001-s00",
    ]
    assert [(request.sample, request.n) for request in requests] == [(i, 1) for i in range(4)] * 3
    assert len({request.seed for request in requests}) == 12
    assert requests[0].messages == requests[3].messages
    assert requests[0].source == requests[3].source == "generated:0"
    assert prepare({"samples_as": "requests"}).requests[0].request_id == "generated-00000"


def test_seeds_are_distinct_even_where_the_stream_repeats():
    seeds = islice(distinct_seeds(named_stream(0, "request-seed"), num_bits=4), 16)
    assert sorted(seeds) == list(range(16))


def test_a_trace_is_replayed_in_order_of_time_with_recorded_lengths_and_its_samples_together(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"input_toks": 2, "output_toks": 11 + i, "arrival_time_ns": at, "input_tok_ids": [i, 9]}
        for i, at in enumerate([9_000, 5_000])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = {"dataset": "sharegpt-replay", "path": str(path), "num_prompts": 2}
    samples = {"samples_per_prompt": 2, "samples_as": "requests", "arrival": {"kind": "trace", "speedup": 2.0}}
    requests = prepare(workload | samples, stop="forced").requests
    sent = [(request.arrival_ns, request.max_tokens) for request in requests]
    assert sent == [(2_500, 12), (2_500, 12), (4_500, 11), (4_500, 11)]
    assert requests[0].request_id == "sharegpt-replay-00001-s00"
    asked = prepare(workload | {"output_len": 3}, stop="forced")
    assert [request.max_tokens for request in asked.requests] == [3, 3]


TRACES = " or ".join(
    names_of_datasets(lambda dataset: isinstance(dataset, FileDataset) and dataset.read_trace is not None)
)


@pytest.mark.parametrize(
    ("workload", "stop", "message"),
    [
        (
            {"dataset": "custom"},
            "natural",
            r"workload\.path is missing with dataset custom; name a JSON Lines file",
        ),
        (
            {"dataset": "gsm8k", "columns": {"prompt": "q"}},
            "natural",
            r"workload\.columns is .*choose dataset custom",
        ),
        ({"split": "test"}, "natural", r"workload\.split is test with dataset generated, which has none"),
        (
            {"dataset": "custom", "path": "/no/file"},
            "natural",
            r"path is /no/file, which is not a file; correct it",
        ),
        ({"dataset": "custom", "path": "/tmp"}, "natural", r"path is /tmp, which is a directory; correct it"),
        ({"dataset": "synthetic"}, "natural", r"workload\.input_len is null with dataset synthetic"),
        ({"input_len": 5}, "natural", r"workload\.input_len is 5 with dataset generated"),
        ({"path": "x.jsonl"}, "natural", r"path is x\.jsonl with dataset generated, which reads no file"),
        ({}, "forced", r"stop is forced, but the prompts of generated .*workload\.output_len"),
        ({"dataset": "sharegpt"}, "forced", "generated, in place of the missing sharegpt, have no output"),
        ({"arrival": {"kind": "trace"}}, "natural", rf"arrival\.kind is trace, .*choose dataset {TRACES}"),
        ({"dataset": "gsm8k", "on_missing_dataset": "fail"}, "natural", r"gsm8k is not at /no/data/.*fetch gsm8k"),
        ({"dataset": "azure-trace"}, "natural", r"dataset azure-trace is not at /no/data/.*data fetch azure-trace"),
    ],
)
def test_what_cannot_be_prepared_is_refused_with_the_key_to_change(workload, stop, message):
    with pytest.raises((ProfileError, DatasetError), match=message):
        prepare(workload, stop=stop)


def test_open_loop_arrivals_are_in_the_set():
    prepared = prepare({"arrival": {"kind": "constant", "request_rate": 2.0}})
    assert [request.arrival_ns for request in prepared.requests] == [500_000_000, 1_000_000_000, 1_500_000_000]


@pytest.mark.parametrize("dataset", ["gsm8k", "sharegpt"])
def test_a_generated_set_steps_in_loudly_for_a_missing_dataset(dataset, monkeypatch, tmp_path):
    monkeypatch.setenv("BENCHCTL_DATA_DIR", str(tmp_path))  # asked where no directory is given
    prepared = prepare_requests(profile_of({"dataset": dataset}))
    assert prepared.dataset == "generated"
    assert prepared.requests == prepare({"dataset": "generated"}).requests
    (warning,) = prepared.warnings
    assert (warning.code, warning.where) == ("dataset-substituted", "workload.dataset")
    assert f"benchctl data fetch {dataset}" in warning.message
    assert "BENCHCTL_DATA_DIR" in warning.message
    assert str(tmp_path) not in warning.message


@pytest.mark.parametrize("chat", [False, True])
def test_synthetic_prompts_are_texts_or_one_message_of_the_length_asked_for(chat):
    lists = {"input_len": [64, 40], "output_len": [2, 30], "num_prompts": 3}
    prepared = prepare({"dataset": "synthetic", "chat": chat, **lists}, stop="forced")
    assert prepared.dataset == "synthetic"
    sizes = [(request.prompt_tokens, request.max_tokens) for request in prepared.requests]
    assert sizes == [(64, 2), (40, 30), (64, 2)]
    assert {request.prompt is None for request in prepared.requests} == {chat}
    roles = {tuple(turn.role for turn in request.messages or ()) for request in prepared.requests}
    assert roles == {("user",) if chat else ()}


def test_every_request_says_who_counted_it():
    tokenizer = byte_level(512)
    prepared = prepare_requests(profile_of({}), Path("/no/data"), tokenizer=tokenizer)
    assert {request.prompt_tokens_from for request in prepared.requests} == {tokenizer.source}
    chats = [request.messages for request in prepared.requests]
    assert tuple(request.prompt_tokens for request in prepared.requests) == tokenizer.count_chats(chats)
    assert {request.prompt_tokens_from for request in prepare({}).requests} == {"estimate"}
