"""The cache of llm-mock: the most frequent beginnings of a set of prompts, filled once."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.http.api import CompletionBody, request_from
from benchctl.sim.requests import StaticPrefixes, static_prefixes

prompts_strategy = st.lists(st.text("abc", max_size=6), min_size=1, max_size=12)


@given(prompts_strategy, st.integers(0, 30))
def test_no_choice_of_as_many_tokens_is_passed_by_more_prompts(prompts: list[str], size: int) -> None:
    cache = StaticPrefixes(prompts, size)
    counts = Counter(prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1))
    assert cache.num_tokens == min(size, len(counts))
    assert sum(map(cache.match, prompts)) == sum(sorted(counts.values(), reverse=True)[:size])


def test_equal_counts_go_to_the_smaller_token_and_of_token_ids_to_the_smaller_number(tmp_path: Path) -> None:
    cache = StaticPrefixes(["xa", "yb"], 2)
    assert [cache.match(prompt) for prompt in ("xa", "yb")] == [2, 0]
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input_tok_ids": [1000, 7]}\n{"input_tok_ids": [500, 8]}\n', encoding="utf-8")
    cache = static_prefixes(str(path), 2)
    assert [cache.match([f"<{token_id}>" for token_id in ids]) for ids in ([1000, 7], [500, 8])] == [0, 2]


def test_a_server_looks_prompts_up_as_they_arrive_and_refuses_a_file_without_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"

    def cached(prompt: list[int], cost_model: str, num_tokens: int = 3) -> int:
        config = SimConfig(cost_model=cost_model, cached_prompts=str(path), cached_prompt_tokens=num_tokens)
        return request_from(CompletionBody(prompt=prompt, model="m"), "r", config).static_tokens

    with pytest.raises(UsageError, match=r"cached_prompts: .*: cannot be read"):
        cached([1], "llm-mock")
    for text, message in (("{}", "prompts.jsonl:1: not a prompt"), ("[", "prompts.jsonl:1: not a")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=message):
            cached([1], "llm-mock", len(text) + len(message))
    path = tmp_path / "whole.jsonl"
    rows = [{"prompt": [1, 2, 3]}, {"input_tok_ids": [1, 2, 9]}, {"prompt": [7]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert [cached(prompt, "llm-mock") for prompt in ([1, 2, 3], [1, 2, 9, 9], [7])] == [3, 2, 0]
    assert cached([1, 2, 3], "roofline") == 2
    assert [cached([1, 2, 3], "llm-mock", size) for size in (0, 1, 2)] == [0, 1, 2]
