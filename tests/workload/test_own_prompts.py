"""Prompts of one's own and Mooncake's traces: read with all that rows say, wrong rows named with their line."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.datasets import first, source
from support.prepared import prepare

from benchctl.errors import DatasetError, ProfileError
from benchctl.workload.datasets.own import custom_prompts
from benchctl.workload.datasets.published import mooncake_trace
from benchctl.workload.prepare import RecordedLoad
from benchctl.workload.seeded import TOKENS_PER_BLOCK
from benchctl.workload.tokenizers import Estimate

CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def custom(path: Path, **workload: Any) -> dict[str, Any]:
    return {"dataset": "custom", "path": str(path), "num_prompts": 1} | workload


# Custom


def test_texts_and_chats_are_sent_as_they_are_with_gold_and_session(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "mine.jsonl",
        {"prompt": "What is 1 + 1?", "gold": 2, "session": "a", "note": "left unread"},
        {"messages": CHAT, "session": 7},
    )
    prepared = prepare(custom(path, num_prompts=2))
    text, chat = prepared.requests
    assert (text.prompt, text.answer, text.session) == ("What is 1 + 1?", "2", "a")
    assert [(turn.role, turn.content) for turn in chat.messages or ()] == [
        ("system", "Be short."),
        ("user", "Hello"),
    ]
    assert (chat.answer, chat.session) == (None, "7")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert prepared.dataset == f"custom/sha256-{digest[:16]}"
    assert [request.request_id for request in prepared.requests] == ["custom-00000", "custom-00001"]
    assert text.source == f"{prepared.dataset}:0"


def test_timestamps_in_milliseconds_are_arrivals_from_the_first(tmp_path: Path) -> None:
    rows = [
        {"prompt": str(at), "timestamp": at, "output_len": 3} for at in (1_700_000_002_500, 1_700_000_000_000.5)
    ]
    workload = custom(write_rows(tmp_path / "t.jsonl", *rows), num_prompts=2, arrival={"kind": "trace"})
    requests = prepare(workload, stop="forced").requests
    assert [request.arrival_ns for request in requests] == [0, 2_499_500_000]
    assert [request.max_tokens for request in requests] == [3, 3]


def test_columns_of_other_names_are_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "qa.jsonl", {"question": "Why?", "answer": "Because."})
    (request,) = prepare(custom(path, columns={"prompt": "question", "gold": "answer"})).requests
    assert (request.prompt, request.answer) == ("Why?", "Because.")


def test_a_planned_prompt_shares_the_blocks_that_it_names(tmp_path: Path) -> None:
    rows = [{"input_len": 1000, "hash_ids": ids} for ids in ([1, 2], [1, 3], [1, 2])]
    one, two, three = prepare(custom(write_rows(tmp_path / "b.jsonl", *rows), num_prompts=3)).requests
    words = [(request.prompt or "").split() for request in (one, two, three)]
    assert [request.prompt_tokens for request in (one, two, three)] == [1000] * 3
    assert words[0][:TOKENS_PER_BLOCK] == words[1][:TOKENS_PER_BLOCK]
    assert words[0][TOKENS_PER_BLOCK] != words[1][TOKENS_PER_BLOCK]
    assert words[0] == words[2]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({}, r"no prompt among its fields \(none\)"),
        ({"promt": "x"}, r"no prompt among its fields promt; did you mean 'prompt'"),
        ({"prompt": "x", "messages": CHAT}, "prompt and messages in one row; keep one of them"),
        ({"prompt": 3}, r"Expected `str \| null`, got `int` - at `\$\.prompt`"),
        ({"prompt": ""}, "prompt is empty"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user"}]}, "missing required field `content`"),
        ({"messages": "hello"}, r"Expected `array \| null`, got `str` - at `\$\.messages`"),
        ({"prompt": "x", "output_len": 0}, r"`int` >= 1 - at `\$.output_len`"),
        ({"prompt": "x", "hash_ids": [1]}, "give input_len in place of its text"),
        ({"input_len": 600, "hash_ids": [1, 2, 3]}, "3 hash_ids for 600 tokens, which are 2 of 512"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_a_wrong_row_is_named_with_its_line_and_the_remedy(tmp_path: Path, row: object, fault: str) -> None:
    path = write_rows(tmp_path / "mine.jsonl", {"prompt": "right"}, row)
    with pytest.raises(DatasetError, match=rf"mine\.jsonl:2: .*{fault}.*; a row is a JSON object with prompt"):
        custom_prompts(source(path, "custom"), first(1), Estimate())


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"empty\.jsonl has no rows; a row is a JSON object"):
        custom_prompts(source(write_rows(tmp_path / "empty.jsonl"), "custom"), first(1), Estimate())


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"dataset": "custom"}, r"workload\.path is missing with dataset custom; name a JSON Lines file"),
        ({"dataset": "gsm8k", "columns": {"prompt": "q"}}, r"workload\.columns is .*choose dataset custom or "),
        ({"split": "test"}, r"workload\.split is test with dataset generated, which has none"),
        ({"dataset": "custom", "path": "/no/file"}, r"workload\.path is /no/file, which is not a file; correct it"),
        ({"dataset": "custom", "path": "/tmp"}, r"workload\.path is /tmp, which is a directory; correct it"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(workload: dict[str, Any], message: str) -> None:
    with pytest.raises((ProfileError, DatasetError), match=message):
        prepare(workload)


def test_what_rows_lack_is_named_by_the_first_row_without(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "m.jsonl", {"prompt": "a", "output_len": 3, "timestamp": 0}, {"prompt": "b"})
    with pytest.raises(ProfileError, match=r"no output lengths of their own \(the first without: custom/\S+:1\)"):
        prepare(custom(path, num_prompts=2), stop="forced")
    with pytest.raises(ProfileError, match=r"arrival\.kind is trace, but custom/\S+:1 has no recorded arrival"):
        prepare(custom(path, num_prompts=2, arrival={"kind": "trace"}))


# Mooncake


def mooncake_row(timestamp: int, tokens: int, ids: list[int], output: int = 5) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids}


def test_mooncake_keeps_lengths_arrivals_and_shared_blocks(tmp_path: Path) -> None:
    rows = [mooncake_row(0, 1100, [0, 1, 2]), mooncake_row(3000, 600, [0, 9]), mooncake_row(3000, 1200, [0, 1, 2])]
    path = write_rows(tmp_path / "trace.jsonl", *rows)
    workload = {"dataset": "mooncake", "path": str(path), "num_prompts": 3, "arrival": {"kind": "trace"}}
    one, two, three = prepare(workload, stop="forced").requests
    assert [request.arrival_ns for request in (one, two, three)] == [0, 3 * 10**9, 3 * 10**9]
    assert [request.prompt_tokens for request in (one, two, three)] == [1100, 600, 1200]
    assert [request.max_tokens for request in (one, two, three)] == [5, 5, 5]
    words = [(request.prompt or "").split() for request in (one, two, three)]
    assert words[0][:512] == words[1][:512]
    assert words[0][512:600] != words[1][512:600]
    assert words[2][:1100] == words[0]
    load = RecordedLoad.of(mooncake_trace(source(path, "mooncake")))
    assert (list(load.prompt_tokens), list(load.arrival_ns)) == ([1100, 600, 1200], [0, 3 * 10**9, 3 * 10**9])


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (mooncake_row(0, 0, []), "lengths are 0 and 5 tokens; each must be from 1 to"),
        (mooncake_row(-1, 5, []), r"Expected `float` >= 0.0 - at `\$.timestamp`"),
        (mooncake_row(0, 512, [1, 2]), "2 hash_ids for 512 tokens, which are 1 of 512"),
        ({"timestamp": 0, "input_length": 5}, "missing required field `output_length`"),
    ],
)
def test_mooncake_refuses_rows_that_contradict_themselves(tmp_path: Path, row: object, fault: str) -> None:
    path = write_rows(tmp_path / "trace.jsonl", mooncake_row(0, 5, [1]), row)
    with pytest.raises(DatasetError, match=rf"trace\.jsonl:2: .*{fault}.*another format"):
        mooncake_trace(source(path, "mooncake"))
