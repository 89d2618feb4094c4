"""llm-mock: times and lengths of its engine, restated here, and its cache of the most frequent beginnings."""

import csv
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.cli import printed
from support.servers.simulator import request_of, run

from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad
from benchctl.sim.costs.llm_mock import mock_length, mock_step_ns
from benchctl.sim.http.api import CompletionBody, request_from
from benchctl.sim.requests import StaticPrefixes, static_prefixes
from benchctl.sim.simulation import simulate


def serve(prompt_tokens, *, batch_size, cached_tokens=None):
    """Output tokens, first token and end (ns) of requests that a loop like that of llm-mock serves in this order.

    Its source is dongmingli-Ben/llm-mock at f07dd39; ``cached_tokens`` of each prompt need not be computed.
    """
    computed = list(cached_tokens or [0] * len(prompt_tokens))
    lengths, firsts = list(prompt_tokens), [0] * len(prompt_tokens)
    ends = [tokens + mock_length(tokens) for tokens in prompt_tokens]
    served, pool, now_ns = {}, list(range(len(lengths))), 0
    while pool:
        batch = pool[:batch_size]
        new = max(lengths[i] - computed[i] for i in batch)
        now_ns += mock_step_ns(len(batch), max(lengths[i] for i in batch), new)
        for i in batch:
            if lengths[i] == ends[i]:  # the closing step, which yields no token and streams the last chunk again
                served[i] = (ends[i] - prompt_tokens[i], firsts[i], now_ns)
            else:
                firsts[i] = firsts[i] or now_ns
                computed[i] = lengths[i]
                lengths[i] += 1
        pool = [i for i in pool if i not in served]
    return [served[i] for i in range(len(prompt_tokens))]


def simulated(config, requests):
    """What ``serve`` says, of the simulator."""
    columns = simulate(config, [SimLoad(requests=tuple(requests))]).requests
    names = ("output_tokens", "first_token_ns", "last_token_ns")
    order = columns.index.argsort()
    return list(zip(*(getattr(columns, name)[order].tolist() for name in names), strict=True))


def cached_lengths(prompts, sources, size):
    """Tokens of each prompt that a static cache of ``size`` tokens has, made from ``sources``; all as token ids."""
    texts = [[[f"{token_id:06d}" for token_id in ids] for ids in lists] for lists in (sources, prompts)]
    return list(map(StaticPrefixes(texts[0], size).match, texts[1]))


def test_steps_take_their_published_time_and_answers_have_the_length_of_its_rule():
    for (num_seqs, longest, new), expected_s in {
        (1, 100, 100): 0.081368, (10, 500, 500): 5.401880, (10, 500, 1): 0.070684, (20, 1024, 1024): 44.870940,
        (0, 0, 0): 0.06,
    }.items():  # fmt: skip
        assert mock_step_ns(num_seqs, longest, new) / 1e9 == pytest.approx(expected_s, abs=5e-7)
    lengths = {0: 50, 4: 50, 5: 51, 12: 52, 100: 70, 499: 149, 500: 150, 1024: 150}
    assert {prompt: mock_length(prompt) for prompt in lengths} == lengths


def test_each_request_has_a_last_step_without_a_token_and_ten_run_at_a_time():
    steps = run(
        [request_of("r", prompt_tokens=100, max_tokens=1000, ignore_eos=False)], cost_model="llm-mock"
    ).steps
    assert [step.output_tokens for step in steps] == [1] * 70 + [0]
    requests = [request_of(f"r{i}", prompt_tokens=10 * (i + 1), max_tokens=3) for i in range(12)]
    assert [step.num_seqs for step in run(requests, cost_model="llm-mock").steps] == [10] * 4 + [2] * 4
    # A closing step computes every token of its row, so that a last token that begins a block needs the block.
    steps = run([request_of("r", prompt_tokens=15, max_tokens=2)], cost_model="llm-mock").steps
    assert [(step.context_tokens, step.kv_used_blocks) for step in steps] == [(15, 1), (16, 1), (17, 2)]


@given(prompts=st.lists(st.integers(1, 600), min_size=1, max_size=14), batch_size=st.sampled_from([1, 3, 10, 20]))
def test_the_loop_and_the_simulator_give_every_request_the_same_times(prompts, batch_size):
    config = SimConfig(cost_model="llm-mock", max_num_seqs=batch_size)
    requests = [
        request_of(f"r{number}", prompt_tokens=tokens, max_tokens=1000, ignore_eos=False)
        for number, tokens in enumerate(prompts)
    ]
    assert simulated(config, requests) == serve(prompts, batch_size=batch_size)


@given(prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=2, max_size=8))
def test_a_static_cache_in_the_simulator_spares_what_it_spares_in_the_loop(prompts, tmp_path_factory):
    file = tmp_path_factory.mktemp("cache") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    config = SimConfig(cost_model="llm-mock", cached_prompts=str(file), cached_prompt_tokens=12)
    bodies = [CompletionBody(prompt=prompt, max_tokens=1000) for prompt in prompts]
    requests = [request_from(body, f"r{number}", config) for number, body in enumerate(bodies)]
    cached = cached_lengths(prompts, prompts, 12)
    assert simulated(config, requests) == serve(list(map(len, prompts)), batch_size=10, cached_tokens=cached)


def test_the_page_gives_the_hits_and_the_p99_of_the_published_engine_marked_as_one_of_50(tmp_path):
    """The page on llm-mock, followed with other prompts."""
    stream = random.Random(4)
    prompts = [stream.choices([7, 500, 1000, 99_999], k=stream.randint(20, 60)) for _ in range(60)]
    rows = [
        {"input_toks": len(ids), "output_toks": 9, "arrival_time_ns": 0, "input_tok_ids": ids} for ids in prompts
    ]
    file = tmp_path / "sharegpt" / "sharegpt-llama-3.1-8b-300-sps10.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (Path(__file__).parents[2] / "docs" / "tasks" / "llm-mock.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^python - <<'END'\n(.*?)^END$", page, re.MULTILINE | re.DOTALL)
    env = {**os.environ, "BENCHCTL_DATA_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, env=env, check=True)
    printed("simulate", "--profile", "llm-mock-cache", "--blocks", "2", "--quiet", cwd=tmp_path)
    summary = tmp_path / "results" / "llm-mock-cache" / "latest-simulated" / "summary.csv"
    told = list(csv.DictReader(summary.read_text().splitlines()))
    for row in told:
        size = int(row["cell"].rpartition("=")[2] or 0)
        cached = cached_lengths(prompts[:50], prompts, size)
        served = serve([len(prompt) for prompt in prompts[:50]], batch_size=10, cached_tokens=cached)
        assert int(row["cached_tokens"]) == sum(cached)
        p99_ms = np.percentile([first_token_ns for _, first_token_ns, _ in served], 99) / 1e6
        assert float(row["p99_ttft_ms"]) == pytest.approx(p99_ms)
        assert (row["num_completed"], row["few_requests"]) == ("50", "p95 p99")
    assert len({row["cached_tokens"] for row in told}) == 4


@given(st.lists(st.text("abc", max_size=6), min_size=1, max_size=12), st.integers(0, 30))
def test_no_choice_of_as_many_tokens_is_passed_by_more_prompts(prompts, size):
    cache = StaticPrefixes(prompts, size)
    counts = Counter(prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1))
    assert cache.num_tokens == min(size, len(counts))
    assert sum(map(cache.match, prompts)) == sum(sorted(counts.values(), reverse=True)[:size])


def test_a_server_looks_prompts_up_as_they_arrive_and_refuses_a_file_without_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"

    def cached(prompt, cost_model, num_tokens=3):
        config = SimConfig(cost_model=cost_model, cached_prompts=str(path), cached_prompt_tokens=num_tokens)
        return request_from(CompletionBody(prompt=prompt, model="m"), "r", config).static_tokens

    with pytest.raises(UsageError, match=r"cached_prompts: .*: cannot be read"):
        cached([1], "llm-mock")
    for text, message in (("{}", "prompts.jsonl:1: not a prompt"), ("[", "prompts.jsonl:1: not a")):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            cached([1], "llm-mock", len(text) + len(message))
    path = tmp_path / "whole.jsonl"
    rows = [{"prompt": [1, 2, 3]}, {"input_tok_ids": [1, 2, 9]}, {"prompt": [7]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [cached(prompt, "llm-mock") for prompt in ([1, 2, 3], [1, 2, 9, 9], [7])] == [3, 2, 0]
    assert cached([1, 2, 3], "roofline") == 2
    assert [cached([1, 2, 3], "llm-mock", size) for size in (0, 1, 2)] == [0, 1, 2]
    # Equal counts go to the smaller token, and of token ids to the smaller number.
    path = tmp_path / "equal.jsonl"
    path.write_text('{"input_tok_ids": [1000, 7]}\n{"input_tok_ids": [500, 8]}\n')
    cache = static_prefixes(str(path), 2)
    assert [cache.match([f"<{token_id}>" for token_id in ids]) for ids in ([1000, 7], [500, 8])] == [0, 2]
