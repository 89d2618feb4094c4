"""The prepared request set: bytes, ids, seeds, lengths, arrivals, and the loud stand-in for a missing dataset."""

import hashlib
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.prepared import prepare, profile_of
from support.tokenizer_kinds import byte_level

from benchctl.errors import DatasetError, ProfileError
from benchctl.records.record import PreparedRequest
from benchctl.workload.datasets.base import FileDataset, names_of_datasets
from benchctl.workload.prepare import prepare_requests
from benchctl.workload.seeded import distinct_seeds, named_stream


def test_the_content_is_the_requests_and_the_hash_is_of_the_content() -> None:
    prepared = prepare({"num_prompts": 20})
    lines = prepared.content.splitlines(keepends=True)
    assert tuple(msgspec.json.decode(line, type=PreparedRequest) for line in lines) == prepared.requests
    assert all(line.endswith(b"\n") for line in lines)
    assert prepared.sha256 == hashlib.sha256(prepared.content).hexdigest()
    assert [request.index for request in prepared.requests] == list(range(20))


MIXED = {
    "dataset": "synthetic",
    "num_prompts": 12,
    "samples_per_prompt": 3,
    "samples_as": "requests",
    "input_len": {"mean": 30.0, "cv": 0.4},
    "output_len": {"mean": 20.0, "cv": 0.4},
    "arrival": {"kind": "gamma", "request_rate": 5.0, "burstiness": 0.7},
}


@pytest.mark.parametrize(
    ("workload", "stop", "sha256"),
    [
        ({"num_prompts": 50}, "natural", "a779bfc5385398ea97886d725e107eb9faefd37aa20d895e00f2b5df4ff48da8"),
        (MIXED, "forced", "dae35b7ee288b27575553802e6a93a2c8c08830cc4677f524906d92b2af67cf9"),
    ],
)
def test_the_bytes_are_the_same_on_every_machine(workload: dict[str, Any], stop: str, sha256: str) -> None:
    assert prepare(workload, stop=stop).sha256 == sha256


def test_the_bytes_do_not_depend_on_the_process_or_where_it_runs(tmp_path: Path) -> None:
    script = (
        "import sys; from benchctl.profile.model import Profile; from benchctl.workload.prepare import *;"
        "print(prepare_requests(Profile.model_validate_json(sys.argv[1])).sha256)"
    )
    profile = profile_of(MIXED, stop="forced").model_dump_json()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "BENCHCTL_DATA_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", script, profile], cwd=tmp_path, env=environment, capture_output=True, check=True
        )
        assert done.stdout.decode().strip() == prepare(MIXED, stop="forced").sha256


def test_neither_paths_nor_the_name_of_the_machine_go_in(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n')
    workload = {"dataset": "gsm8k", "path": str(path), "num_prompts": 1}
    moved = tmp_path / "moved.jsonl"
    prepared = prepare(workload)
    path.rename(moved)
    assert prepare(workload | {"path": str(moved)}).content == prepared.content
    assert str(tmp_path).encode() not in prepared.content


def test_another_seed_changes_the_set() -> None:
    assert prepare({}, seed=1).sha256 != prepare({}, seed=2).sha256


def test_more_prompts_extend_the_same_set() -> None:
    small = prepare(MIXED | {"num_prompts": 4}, stop="forced")
    assert prepare(MIXED, stop="forced").content.startswith(small.content)


def test_samples_as_one_request_ask_for_n_choices() -> None:
    prepared = prepare({"samples_per_prompt": 4})
    assert [request.request_id for request in prepared.requests] == [f"generated-{i:05d}" for i in range(3)]
    assert {request.n for request in prepared.requests} == {4}


def test_samples_as_requests_have_their_own_ids_and_seeds() -> None:
    prepared = prepare({"samples_per_prompt": 4, "samples_as": "requests"})
    ids = [request.request_id for request in prepared.requests]
    assert ids[:5] == [
        "generated-00000-s00",
        "generated-00000-s01",
        "generated-00000-s02",
        "generated-00000-s03",
        "generated-00001-s00",
    ]
    assert [request.sample for request in prepared.requests] == [0, 1, 2, 3] * 3
    assert {request.n for request in prepared.requests} == {1}
    assert len({request.seed for request in prepared.requests}) == 12
    assert prepared.requests[0].messages == prepared.requests[3].messages
    assert prepared.requests[0].source == prepared.requests[3].source == "generated:0"


def test_a_single_sample_needs_no_suffix() -> None:
    prepared = prepare({"samples_as": "requests"})
    assert prepared.requests[0].request_id == "generated-00000"


def test_seeds_are_distinct_even_where_the_stream_repeats() -> None:
    seeds = islice(distinct_seeds(named_stream(0, "request-seed"), num_bits=4), 16)
    assert sorted(seeds) == list(range(16))


def test_natural_stop_limits_every_output_alike() -> None:
    prepared = prepare({"max_tokens": 77, "output_len": 5})
    assert {(request.max_tokens, request.ignore_eos) for request in prepared.requests} == {(77, False)}


def test_forced_stop_draws_one_length_for_all_samples_of_a_prompt() -> None:
    prepared = prepare(MIXED, stop="forced")
    lengths = [request.max_tokens for request in prepared.requests]
    assert lengths[0] == lengths[1] == lengths[2]
    assert len(set(lengths)) > 3
    assert all(request.ignore_eos for request in prepared.requests)


def test_forced_stop_uses_the_recorded_lengths_unless_others_are_asked_for(tmp_path: Path) -> None:
    workload = recorded_trace(tmp_path, arrivals=[5, 9])
    assert [r.max_tokens for r in prepare(workload, stop="forced").requests] == [11, 12]
    assert [r.max_tokens for r in prepare(workload | {"output_len": 3}, stop="forced").requests] == [3, 3]


def test_forced_stop_without_any_length_names_the_key_to_set() -> None:
    with pytest.raises(ProfileError, match=r"stop is forced, but the prompts of generated .*workload\.output_len"):
        prepare({}, stop="forced")
    with pytest.raises(
        ProfileError, match="prompts of generated, in place of the missing sharegpt, have no output"
    ):
        prepare({"dataset": "sharegpt"}, stop="forced")


def recorded_trace(tmp_path: Path, arrivals: list[int], **workload: Any) -> dict[str, Any]:
    rows = [
        {"input_toks": 2, "output_toks": 11 + i, "arrival_time_ns": at, "input_tok_ids": [i, 9]}
        for i, at in enumerate(arrivals)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"dataset": "sharegpt-replay", "path": str(path), "num_prompts": len(rows)} | workload


def test_a_trace_is_replayed_in_order_of_time_with_its_samples_together(tmp_path: Path) -> None:
    workload = recorded_trace(
        tmp_path,
        arrivals=[9_000, 5_000],
        samples_per_prompt=2,
        samples_as="requests",
        arrival={"kind": "trace", "speedup": 2.0},
    )
    prepared = prepare(workload, stop="forced")
    assert [request.arrival_ns for request in prepared.requests] == [2_500, 2_500, 4_500, 4_500]
    assert [request.max_tokens for request in prepared.requests] == [12, 12, 11, 11]
    assert prepared.requests[0].request_id == "sharegpt-replay-00001-s00"


def test_a_trace_needs_a_dataset_with_arrivals() -> None:
    traces = names_of_datasets(lambda dataset: isinstance(dataset, FileDataset) and dataset.read_trace is not None)
    with pytest.raises(ProfileError, match=rf"arrival\.kind is trace, .*choose dataset {' or '.join(traces)}"):
        prepare({"arrival": {"kind": "trace"}})


def test_open_loop_arrivals_are_in_the_set() -> None:
    prepared = prepare({"arrival": {"kind": "constant", "request_rate": 2.0}})
    assert [request.arrival_ns for request in prepared.requests] == [500_000_000, 1_000_000_000, 1_500_000_000]


@pytest.mark.parametrize("dataset", ["gsm8k", "sharegpt"])
def test_a_generated_set_steps_in_loudly_for_a_missing_dataset(dataset: str) -> None:
    prepared = prepare({"dataset": dataset})
    assert prepared.dataset == "generated"
    assert {request.source.partition(":")[0] for request in prepared.requests} == {"generated"}
    assert prepared.requests == prepare({"dataset": "generated"}).requests
    (warning,) = prepared.warnings
    assert (warning.code, warning.where) == ("dataset-substituted", "workload.dataset")
    assert f"benchctl data fetch {dataset}" in warning.message
    assert "BENCHCTL_DATA_DIR" in warning.message
    assert "/no/data" not in warning.message


@pytest.mark.parametrize(
    ("dataset", "on_missing_dataset"),
    [("gsm8k", "fail"), ("sharegpt-replay", "generate"), ("azure-trace", "generate")],
)
def test_a_missing_dataset_fails_where_nothing_may_step_in(dataset: str, on_missing_dataset: str) -> None:
    with pytest.raises(DatasetError, match=rf"dataset {dataset} is not at /no/data/.*data fetch {dataset}"):
        prepare({"dataset": dataset, "on_missing_dataset": on_missing_dataset})


def test_the_data_directory_is_asked_when_none_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BENCHCTL_DATA_DIR", str(tmp_path))
    with pytest.raises(DatasetError, match=str(tmp_path)):
        prepare_requests(profile_of({"dataset": "gsm8k", "on_missing_dataset": "fail"}))


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"dataset": "synthetic"}, r"workload\.input_len is null with dataset synthetic"),
        ({"input_len": 5}, r"workload\.input_len is 5 with dataset generated"),
        ({"path": "x.jsonl"}, r"workload\.path is x\.jsonl with dataset generated, which reads no file"),
    ],
)
def test_keys_that_would_be_left_unread_are_refused(workload: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        prepare(workload)


def test_synthetic_prompts_are_plain_text_of_the_length_asked_for() -> None:
    prepared = prepare({"dataset": "synthetic", "input_len": 9, "output_len": 4}, stop="forced")
    assert prepared.dataset == "synthetic"
    assert [request.prompt_tokens for request in prepared.requests] == [9, 9, 9]
    assert all(request.prompt is not None and request.messages is None for request in prepared.requests)


def test_a_chat_of_a_planned_length_is_one_message_of_the_user() -> None:
    prepared = prepare({"dataset": "synthetic", "input_len": 40, "output_len": 4, "chat": True}, stop="forced")
    assert [request.prompt_tokens for request in prepared.requests] == [40, 40, 40]
    assert all(request.prompt is None for request in prepared.requests)
    assert [[turn.role for turn in request.messages or ()] for request in prepared.requests] == [["user"]] * 3


def test_every_request_says_who_counted_it() -> None:
    tokenizer = byte_level(512)
    prepared = prepare_requests(profile_of({}), Path("/no/data"), tokenizer=tokenizer)
    assert {request.prompt_tokens_from for request in prepared.requests} == {tokenizer.source}
    chats = [request.messages or () for request in prepared.requests]
    assert tuple(request.prompt_tokens for request in prepared.requests) == tokenizer.count_chats(chats)
    assert {request.prompt_tokens_from for request in prepare({}).requests} == {"estimate"}


def test_lists_of_lengths_pair_prompts_with_outputs() -> None:
    lists = {"input_len": [64, 8], "output_len": [2, 30]}
    requests = prepare({"dataset": "synthetic", "num_prompts": 5, **lists}, stop="forced").requests
    sizes = [(request.prompt_tokens, request.max_tokens) for request in requests]
    assert sizes == [(64, 2), (8, 30), (64, 2), (8, 30), (64, 2)]
