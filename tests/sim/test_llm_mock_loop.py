"""llm-mock restated for its published experiments: the times of the simulator, and the best cache of a size."""

import csv
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cli import benchctl
from support.llm_mock_loop import cached_lengths, serve

from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad, simulate
from benchctl.sim.http.api import CompletionBody, request_from
from benchctl.sim.requests import Prompt, Request

PROMPTS = st.lists(st.integers(1, 600), min_size=1, max_size=14)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


def request_of(number, num_tokens):
    prompt = Prompt.of([f"word{i}" for i in range(num_tokens)], 16)
    return Request(request_id=f"r{number}", prompt=prompt, max_tokens=1000)


@given(prompts=PROMPTS, batch_size=st.sampled_from([1, 3, 10, 20]))
def test_the_loop_and_the_simulator_give_every_request_the_same_times(prompts, batch_size):
    config = SimConfig(cost_model="llm-mock", max_num_seqs=batch_size)
    requests = tuple(request_of(number, tokens) for number, tokens in enumerate(prompts))
    columns = simulate(config, [SimLoad(requests=requests)]).requests
    order = columns.index.argsort()
    served = serve(prompts, batch_size=batch_size)
    assert [one.output_tokens for one in served] == columns.output_tokens[order].tolist()
    assert [one.first_token_ns for one in served] == columns.first_token_ns[order].tolist()
    assert [one.end_ns for one in served] == columns.last_token_ns[order].tolist()


@given(prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=2, max_size=8))
def test_a_static_cache_in_the_simulator_spares_what_it_spares_in_the_loop(prompts, tmp_path_factory):
    file = tmp_path_factory.mktemp("cache") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    cached = cached_lengths(prompts, prompts, 12)
    config = SimConfig(cost_model="llm-mock", cached_prompts=str(file), cached_prompt_tokens=12)
    bodies = [CompletionBody(prompt=prompt, max_tokens=1000) for prompt in prompts]
    requests = tuple(request_from(body, f"r{number}", config) for number, body in enumerate(bodies))
    columns = simulate(config, [SimLoad(requests=requests)]).requests
    order = columns.index.argsort()
    served = serve([len(prompt) for prompt in prompts], batch_size=10, cached_tokens=cached)
    assert [one.first_token_ns for one in served] == columns.first_token_ns[order].tolist()


@pytest.fixture(scope="module", name="followed")
def _followed(tmp_path_factory):
    """The page on llm-mock, followed with other prompts: where it was, and the token ids of the prompts."""
    path, stream = tmp_path_factory.mktemp("page"), random.Random(4)
    (path / "sharegpt").mkdir()
    prompts = [stream.choices([7, 500, 1000, 99_999], k=stream.randint(20, 60)) for _ in range(60)]
    rows = [
        {"input_toks": len(ids), "output_toks": 9, "arrival_time_ns": 0, "input_tok_ids": ids} for ids in prompts
    ]
    file = path / "sharegpt" / "sharegpt-llama-3.1-8b-300-sps10.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (Path(__file__).parents[2] / "docs" / "tasks" / "llm-mock.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^python - <<'END'\n(.*?)^END$", page, re.MULTILINE | re.DOTALL)
    env = {**os.environ, "BENCHCTL_DATA_DIR": str(path)}
    subprocess.run([sys.executable, "-c", lines], cwd=path, env=env, check=True)
    done = benchctl("simulate", "--profile", "llm-mock-cache", "--blocks", "2", "--quiet", cwd=path)
    assert done.returncode == 0, done.stderr
    return path, prompts


def rows_of(table):
    return list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))


def test_the_page_gives_the_hits_and_the_p99_of_the_published_engine_marked_as_one_of_50(followed):
    path, prompts = followed
    results = path / "results" / "llm-mock-cache" / "latest"
    rows = rows_of(results / "summary.csv")
    for row in rows:
        size = int(row["cell"].rpartition("=")[2] or 0)
        cached = cached_lengths(prompts[:50], prompts, size)
        served = serve([len(prompt) for prompt in prompts[:50]], batch_size=10, cached_tokens=cached)
        assert int(row["cached_tokens"]) == sum(cached)
        p99_ms = np.percentile([one.first_token_ns for one in served], 99) / 1e6
        assert float(row["p99_ttft_ms"]) == pytest.approx(p99_ms)
        assert (row["num_completed"], row["few_requests"]) == ("50", "p95 p99")
    assert len({row["cached_tokens"] for row in rows}) == 4
