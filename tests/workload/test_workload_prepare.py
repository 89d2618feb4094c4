"""The prepared request set: bytes, ids, seeds, lengths, arrivals, generated problems, and stand-ins for files."""

import hashlib
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from support.prepared import prepare, profile_of
from support.tokenizer_kinds import byte_level

from benchctl.errors import DatasetError, ProfileError
from benchctl.profile.arrival import (
    Arrival,
    arrival_offsets_ns,
    constant_offsets_ns,
    gamma_gaps_ns,
    launch_offsets_ns,
    trace_offsets_ns,
)
from benchctl.profile.model import LengthRange
from benchctl.records.record import PreparedRequest
from benchctl.workload.datasets.base import FileDataset, names_of_datasets
from benchctl.workload.datasets.made import STORIES, generated_prompts, problems, without_repeats
from benchctl.workload.prepare import prepare_requests
from benchctl.workload.seeded import draw_length, draw_lengths

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
    lines = prepared.content.splitlines()
    assert tuple(msgspec.json.decode(line, type=PreparedRequest) for line in lines) == prepared.requests
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
    contents = set()
    for name in ("mine.jsonl", "moved.jsonl"):
        (tmp_path / name).write_text('{"question": "q", "answer": "#### 1"}\n')
        contents.add(prepare({"dataset": "gsm8k", "path": str(tmp_path / name), "num_prompts": 1}).content)
    (content,) = contents
    assert str(tmp_path).encode() not in content


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
    samples = [(request.request_id, request.source, request.sample, request.n) for request in requests]
    assert samples == [
        (f"generated-{prompt:05d}-s{i:02d}", f"generated:{prompt}", i, 1) for prompt in range(3) for i in range(4)
    ]
    assert len({request.seed for request in requests}) == 12
    assert requests[0].messages == requests[3].messages
    assert prepare({"samples_as": "requests"}).requests[0].request_id == "generated-00000"


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


@pytest.mark.parametrize("dataset", ["gsm8k", "sharegpt"])
def test_a_generated_set_steps_in_loudly_for_a_missing_dataset(dataset, monkeypatch, tmp_path):
    monkeypatch.setenv("BENCHCTL_DATA_DIR", str(tmp_path))  # asked where no directory is given
    prepared = prepare_requests(profile_of({"dataset": dataset}))
    assert (prepared.dataset, prepared.requests) == ("generated", prepare({"dataset": "generated"}).requests)
    (warning,) = prepared.warnings
    assert (warning.code, warning.where) == ("dataset-substituted", "workload.dataset")
    assert f"benchctl data fetch {dataset}" in warning.message
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


OPEN_LOOP = [
    Arrival(kind="constant", request_rate=7.0),
    Arrival(kind="poisson", request_rate=7.0),
    Arrival(kind="gamma", request_rate=7.0, burstiness=0.3),
]


def test_bursts_come_at_once_and_constant_arrivals_are_evenly_spaced_and_never_drift():
    for arrival in (Arrival(kind="closed-loop", max_concurrency=4), Arrival(kind="burst")):
        assert arrival_offsets_ns(arrival, 5, random.Random(1)) == (0, 0, 0, 0, 0)
    assert [*islice(constant_offsets_ns(4.0), 3)] == [250_000_000, 500_000_000, 750_000_000]
    assert next(islice(constant_offsets_ns(3.0), 299_999, None)) == 10**14


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness_that_are_asked_for(burstiness):
    num = 20_000
    gaps = list(islice(gamma_gaps_ns(20.0, burstiness, random.Random(f"3:{burstiness}")), num))
    cv = 1 / math.sqrt(burstiness)
    assert statistics.fmean(gaps) == pytest.approx(1e9 / 20, rel=4 * cv / math.sqrt(num))
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.06)


def test_poisson_is_gamma_with_burstiness_one_and_depends_on_its_seed():
    def offsets(seed, **settings):
        return arrival_offsets_ns(Arrival(request_rate=3.0, **settings), 50, random.Random(seed))

    poisson = offsets(5, kind="poisson", burstiness=9.0)
    assert poisson == offsets(5, kind="gamma", burstiness=1.0)
    assert poisson != offsets(6, kind="poisson", burstiness=9.0)


@pytest.mark.parametrize("arrival", OPEN_LOOP, ids=lambda arrival: arrival.kind)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(0, 60), more=st.integers(0, 60))
def test_more_requests_extend_the_same_schedule_and_time_never_runs_back(arrival, seed, num, more):
    offsets = arrival_offsets_ns(arrival, num + more, random.Random(seed))
    assert offsets[:num] == arrival_offsets_ns(arrival, num, random.Random(seed))
    assert all(earlier <= later for earlier, later in pairwise((0, *offsets)))


@settings(max_examples=60)
@given(gaps_ns=st.lists(st.integers(0, 10**9), min_size=1, max_size=50), limit_per_s=st.floats(0.1, 5000.0))
def test_limited_launches_keep_order_and_distance_and_are_held_back_no_longer_than_that(gaps_ns, limit_per_s):
    planned_ns = [sum(gaps_ns[: i + 1]) for i in range(len(gaps_ns))]
    launches_ns = launch_offsets_ns(planned_ns, limit_per_s)
    assert launches_ns[0] == planned_ns[0]
    for (before, after), planned in zip(pairwise(launches_ns), planned_ns[1:], strict=True):
        assert after - before >= 10**9 / limit_per_s - 1
        assert after == planned or after - before == pytest.approx(10**9 / limit_per_s, abs=1)


def test_a_limited_burst_and_a_trace_in_order_of_time_and_faster_on_demand():
    assert launch_offsets_ns((0, 5, 5), None) == (0, 5, 5)
    assert launch_offsets_ns((0, 0, 0, 0), 40.0) == (0, 25_000_000, 50_000_000, 75_000_000)
    assert launch_offsets_ns(iter((0,) * 300_001), 3.0)[-1] == pytest.approx(10**14, abs=2**10)
    assert trace_offsets_ns([30, 10, 20], 1.0) == (10, 20, 30)
    assert trace_offsets_ns([10, 20, 30], 2.0) == (5, 10, 15)


def test_lengths_have_the_mean_and_variation_that_are_asked_for_within_their_range():
    stream = random.Random("lengths")
    lengths = [draw_length(LengthRange(mean=200.0, cv=0.5), stream) for _ in range(20_000)]
    assert statistics.fmean(lengths) == pytest.approx(200, rel=0.02)
    assert statistics.pstdev(lengths) / statistics.fmean(lengths) == pytest.approx(0.5, rel=0.05)
    bounded = {draw_length(LengthRange(mean=100.0, cv=5.0, min=90, max=130), stream) for _ in range(500)}
    assert (min(bounded), max(bounded)) == (90, 130)
    assert [draw_length(LengthRange(mean=99.6), stream), draw_length(17, stream)] == [100, 17]
    assert [*islice(draw_lengths((5, 7, 9), stream), 5)] == [5, 7, 9, 5, 7]


GSM8K_SIZE = 1319

# Each rule reads the numbers of a problem in the order in which its text names them.
RULES = {
    "change_at_the_shop": lambda num, price, more, cheap, paid: paid - (num * price + more * cheap),
    "weekly_savings": lambda earned, spent, weeks, cost: weeks * earned - weeks * spent - cost,
    "bake_sale": lambda trays, each, burnt, box, price: Fraction(trays * each - burnt, box) * price,
    "road_trip": lambda hours, speed, later, slower, total: total - hours * speed - later * slower,
    "pooled_collection": lambda owned, times, children: Fraction(owned + times * owned, children),
    "coat_on_sale": lambda price, percent, coupon: price - Fraction(price * percent, 100) - coupon,
    "ages": lambda times, years, then: (then - years) * times,
    "flower_beds": lambda rows, each, more, fewer, lost, price: (rows * each + more * fewer - lost) * price,
    "overtime": lambda wage, limit, higher, hours: limit * wage + (hours - limit) * higher,
    "reading_plan": lambda pages, per_day, days, left: Fraction(pages - per_day * days, left),
    "leaking_tank": lambda full, held, inflow, leak: Fraction(full - held, inflow - leak),
    "pizza_party": lambda pizzas, slices, guests, eaten: pizzas * slices - guests * eaten,
    "sticker_album": lambda owned, packs, each: Fraction(owned, 2) + packs * each,
    "two_machines": lambda first, second, minutes, bad: Fraction((first + second) * minutes * (100 - bad), 100),
    "lending_library": lambda shelves, each, lent, returned: shelves * each - lent + returned,
    "club_budget": lambda members, fee, rent, balls, price: members * fee - rent - balls * price,
    "shell_hunt": lambda shells, more, times: shells + shells + more + times * (shells + more),
    "gift_ribbon": lambda total, gifts, each, piece: Fraction(total - gifts * each, piece),
}


def test_every_answer_follows_from_the_numbers_of_its_sentence():
    stories = set()
    for problem in islice(problems(seed=11), 2000):
        numbers = [int(digits) for digits in re.findall(r"\d+", problem.question)]
        assert RULES[problem.story](*numbers) == problem.answer, problem.question
        assert min(*numbers, problem.answer) > 0
        assert problem.question.endswith("?")
        assert not re.search(r"  |{", problem.question)
        stories.add(problem.story)
    assert stories == {story.__name__ for story in STORIES}
    assert len(stories) >= 12


def test_no_question_repeats_within_a_set_as_large_as_gsm8k():
    questions = [problem.question for problem in islice(problems(1), GSM8K_SIZE)]
    assert len(set(questions)) == GSM8K_SIZE
    first, second = islice(problems(0), 2)
    assert list(without_repeats([first, first, second])) == [first, second]


def test_more_problems_extend_the_same_sequence_and_seeds_differ():
    assert generated_prompts(30, 4)[:10] == generated_prompts(10, 4)
    assert generated_prompts(10, 4) != generated_prompts(10, 5)


def test_lengths_are_distributed_like_those_of_gsm8k():
    words = [len(problem.question.split()) for problem in islice(problems(0), GSM8K_SIZE)]
    assert statistics.fmean(words) == pytest.approx(46.25, rel=0.1)
    assert statistics.stdev(words) == pytest.approx(18.07, rel=0.2)
