"""The cache of llm-mock: the most frequent beginnings of a set of prompts, filled once."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers.simulator import prompt_of, request_of, run

from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.llm_mock import mock_step_ns
from benchctl.sim.http.api import CompletionBody, request_from
from benchctl.sim.requests import StaticPrefixes, static_prefixes

prompts_strategy = st.lists(st.text("abc", max_size=6), min_size=1, max_size=12)


@given(prompts_strategy, st.integers(0, 30))
def test_no_choice_of_as_many_tokens_is_passed_by_more_prompts(prompts: list[str], size: int) -> None:
    cache = StaticPrefixes(prompts, size)
    counts = Counter(prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1))
    assert cache.num_tokens == min(size, len(counts))
    assert sum(map(cache.match, prompts)) == sum(sorted(counts.values(), reverse=True)[:size])


@given(prompts_strategy, st.text("abc", max_size=8))
def test_a_cache_with_room_for_all_knows_every_beginning(prompts: list[str], prompt: str) -> None:
    beginnings = {known[:end] for known in prompts for end in range(len(known) + 1)}
    longest = max(end for end in range(len(prompt) + 1) if prompt[:end] in beginnings)
    assert StaticPrefixes(prompts, 1000).match(prompt) == longest


def test_equal_counts_go_to_the_smaller_token() -> None:
    cache = StaticPrefixes(["xa", "yb"], 2)
    assert [cache.match(prompt) for prompt in ("xa", "yb")] == [2, 0]


def test_equal_counts_of_token_ids_go_to_the_smaller_number(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input_tok_ids": [1000, 7]}\n{"input_tok_ids": [500, 8]}\n', encoding="utf-8")
    cache = static_prefixes(str(path), 2)
    assert [cache.match([f"<{token_id}>" for token_id in ids]) for ids in ([1000, 7], [500, 8])] == [0, 2]


def test_a_prompt_in_the_cache_costs_llm_mock_nothing_before_its_first_token() -> None:
    def first_ns(cached: int) -> int:
        request = request_of("r", prompt=prompt_of(100), static_tokens=cached)
        return run([request], cost_model="llm-mock").steps[0].dur_ns

    assert [first_ns(cached) for cached in (0, 60, 100)] == [mock_step_ns(1, 100, new) for new in (100, 40, 0)]


def test_a_server_looks_prompts_up_as_they_arrive(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [1, 2, 3]}, {"input_tok_ids": [1, 2, 9]}, {"prompt": [7]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def cached(prompt: list[int], cost_model: str, num_tokens: int = 3) -> int:
        config = SimConfig(cost_model=cost_model, cached_prompts=str(path), cached_prompt_tokens=num_tokens)
        return request_from(CompletionBody(prompt=prompt, model="m"), "r", config).static_tokens

    assert [cached(prompt, "llm-mock") for prompt in ([1, 2, 3], [1, 2, 9, 9], [7])] == [3, 2, 0]
    assert cached([1, 2, 3], "roofline") == 2
    assert list(itertools.accumulate(cached([1, 2, 3], "llm-mock", size) for size in (0, 1, 2))) == [0, 1, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cached_prompts: .*: cannot be read"),
        ("{}", "prompts.jsonl:1: not a prompt"),
        ("[", "prompts.jsonl:1: not a"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    config = SimConfig(cost_model="llm-mock", cached_prompts=str(path))
    with pytest.raises(UsageError, match=message):
        request_from(CompletionBody(prompt=[1], model="m"), "r", config)
