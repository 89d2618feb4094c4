"""Recorded and synthetic prompts: exact lengths, kept arrivals, shared prefixes, named damage."""

import json
from pathlib import Path

import pytest
from support.datasets import DATA, first, needs_data, source

from benchctl.errors import DatasetError
from benchctl.workload.datasets.base import Selection, SourceFile, dataset_file, find_source
from benchctl.workload.datasets.made import synthetic_prompts
from benchctl.workload.datasets.published import DATASETS, timestamp_ns
from benchctl.workload.seeded import numbers_of_prompt
from benchctl.workload.tokenizers import Estimate
from benchctl.workload.written_texts import counted_prompts

replay_prompts = DATASETS["sharegpt-replay"].read
azure_prompts = DATASETS["azure-trace"].read


# Replay


def replay_row(ids: list[int] | None, output: int = 7, arrival: int = 5, **more: int) -> dict[str, object]:
    row = {"output_toks": output, "arrival_time_ns": arrival, "input_toks": len(ids or [0] * 9)} | more
    return row if ids is None else row | {"input_tok_ids": ids}


def write_replay(path: Path, rows: list[dict[str, object]]) -> SourceFile:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return source(path, "sharegpt-replay")


def test_replay_keeps_token_ids_lengths_and_arrivals(tmp_path: Path) -> None:
    ids = [5971, 2927, 220, 128_000]
    rows = [replay_row(ids), replay_row([*ids, 7], arrival=9), replay_row(None)]
    one, two, no_ids = replay_prompts(write_replay(tmp_path / "r.jsonl", rows), first(3), Estimate())
    assert (one.token_numbers, two.token_numbers) == (tuple(ids), (*ids, 7))
    assert no_ids.token_numbers == numbers_of_prompt(9, 2, seed=0)
    assert (two.output_tokens, two.arrival_ns) == (7, 9)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (replay_row([1, 2], output=0), "each must be from 1 to"),
        (replay_row([1, 2], arrival=-1), "before the beginning"),
        (replay_row([1, 2], input_toks=3), "input_toks is 3, but there are 2 input_tok_ids"),
    ],
)
def test_replay_refuses_rows_that_contradict_themselves(tmp_path: Path, row: dict[str, object], fault: str) -> None:
    with pytest.raises(DatasetError, match=rf"r\.jsonl:2: .*{fault}"):
        replay_prompts(write_replay(tmp_path / "r.jsonl", [replay_row([1]), row]), first(1), Estimate())


@needs_data
def test_the_real_replay_has_exact_prompt_lengths() -> None:
    file = find_source(dataset_file("sharegpt-replay"), None, DATA)
    assert file is not None
    prompts = replay_prompts(file, first(300), Estimate())
    counted = counted_prompts(prompts, Estimate(), chat=False)
    assert [prompt.num_tokens for prompt in counted] == [len(prompt.token_numbers or ()) for prompt in prompts]
    assert sum(prompt.num_tokens for prompt in counted) == 257_239
    assert prompts[-1].arrival_ns == 29_183_763_203


# Azure

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)


def write_azure(path: Path, content: str) -> SourceFile:
    path.write_bytes(content.encode())
    return source(path, "azure-trace")


def test_azure_timestamps_keep_their_seven_decimals() -> None:
    assert timestamp_ns("1970-01-01 00:00:01.0000001") == 1_000_000_100
    assert timestamp_ns("2023-11-16 18:15:46.6805900") == 1_700_158_546_680_590_000
    assert timestamp_ns("1970-01-02 00:00:00") == 86_400 * 10**9


def test_azure_gives_lengths_and_arrivals_from_the_first_row(tmp_path: Path) -> None:
    one, two = azure_prompts(write_azure(tmp_path / "a.csv", AZURE), first(2), Estimate())
    assert (one.arrival_ns, two.arrival_ns) == (0, 4_314_579_000)
    assert (len(two.token_numbers or ()), two.output_tokens) == (396, 109)
    assert two.prompt_id == "azure-trace-00001"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("yesterday,1,1", "timestamp 'yesterday' is not of the form"),
        ("2023-13-16 18:15:46.1,1,1", "month must be in 1..12"),
        ("2023-11-16 18:15:51.1,one,1", "invalid literal"),
        ("2023-11-16 18:15:51.1,0,1", "each must be from 1 to"),
        ("2023-11-16 18:15:51.1,5", "invalid literal"),
        ("2023-11-16 18:15:51.1,5,5,5", "4 values under 3 names"),
        ("2023-11-16 18:15:45.1,5,5", "before that of the previous row"),
    ],
)
def test_azure_refuses_damaged_rows_with_their_line(tmp_path: Path, row: str, fault: str) -> None:
    with pytest.raises(DatasetError, match=rf"a\.csv:4: .*{fault}"):
        azure_prompts(write_azure(tmp_path / "a.csv", f"{AZURE}{row}\r\n"), first(1), Estimate())


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n"])
def test_azure_refuses_another_header(tmp_path: Path, content: str) -> None:
    with pytest.raises(
        DatasetError, match=r"a\.csv:1: the header is .*not 'TIMESTAMP,ContextTokens,GeneratedTokens'"
    ):
        azure_prompts(write_azure(tmp_path / "a.csv", content), first(1), Estimate())


@needs_data
def test_the_real_azure_trace_spans_an_hour() -> None:
    file = find_source(dataset_file("azure-trace"), None, DATA)
    assert file is not None
    prompts = azure_prompts(file, Selection(num_prompts=500, method="sample", seed=0), Estimate())
    counted = counted_prompts(prompts[:50], Estimate(), chat=False)
    assert all(one.num_tokens == len(each.token_numbers or ()) for one, each in zip(counted, prompts, strict=False))
    assert max(prompt.arrival_ns or 0 for prompt in prompts) < 3600 * 10**9


# Synthetic


def test_synthetic_prompts_share_no_beginning() -> None:
    prompts = synthetic_prompts(3, 200, seed=0)
    assert len({(prompt.token_numbers or ())[0] for prompt in prompts}) == 200
    assert synthetic_prompts(3, 5, seed=1) != synthetic_prompts(3, 5, seed=0)
