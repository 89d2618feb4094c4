"""The simulator priced by measured layers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.servers.simulator import MIXED_BATCH, decode_batch, request_of

from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad, simulate
from benchctl.sim.costs.cost_model import StepBatch, cost_model_for
from benchctl.sim.engine import SimulatedEngine
from tests.support.layer_tables import attention_us, step_us, verification_us, write_tables

LAYERS = 28
"""Of qwen2.5-7b."""


def _config(folder: Path) -> SimConfig:
    return SimConfig(cost_model="layer-profile", layer_profile=str(folder), max_num_seqs=64)


def test_a_mixed_step_takes_the_time_of_its_measured_layers(tmp_path: Path) -> None:
    history = (60 * (20 + 30) + 40 * (180 + 20)) / 100 - 50
    expected = step_us(LAYERS, 112, 7, attention_us(100, history, 5, 120))  # padded to a graph of 112 tokens
    cost = cost_model_for(_config(write_tables(tmp_path / "tp1"))).price(MIXED_BATCH)
    assert cost.sections() == {"schedule": 0, "model_forward": pytest.approx(expected * 1e3, abs=1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("layers") / "tp1")


def test_a_verification_computes_and_samples_all_tokens_and_reads_each_cache_once(folder: Path) -> None:
    """Eight rows of 100 tokens with 3 drafts each."""
    batch = decode_batch(8, 800 + 24, num_decode_tokens=32, num_sampling=32, draft_tokens=24)
    expected = step_us(LAYERS, 32, 32, attention_us(0, 0, 8, 103))
    cost = cost_model_for(_config(folder)).price(batch)
    assert cost.sections() == {"schedule": 0, "model_forward": pytest.approx(expected * 1e3, abs=1)}


def verification(rows: int, before: int, num_draft_tokens: int) -> StepBatch:
    """Rows of ``before`` tokens each that verify so many drafts besides their newest token."""
    drafts, context = rows * num_draft_tokens, rows * (before + num_draft_tokens + 1)
    positions = sum(rows * (before + 1 + j) for j in range(1, num_draft_tokens + 1))
    return decode_batch(
        rows,
        context,
        num_decode_tokens=rows + drafts,
        num_sampling=rows + drafts,
        attended_positions=rows * (before + 1) + positions,
        draft_tokens=drafts,
        draft_positions=positions,
    )


def forward_ns(folder: Path, batch: StepBatch) -> int:
    return cost_model_for(_config(folder)).price(batch).model_forward


@pytest.fixture(scope="module")
def verifying_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verifying") / "tp1"
    return write_tables(folder, measures_key=True, query_tokens=(2, 5))


@pytest.fixture(scope="module")
def slow_prompts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts without decoding rows take a hundred times as long as in the other tables."""
    folder = write_tables(tmp_path_factory.mktemp("slow") / "tp1")
    head, *lines = (folder / "attention.csv").read_text(encoding="utf-8").splitlines()
    slow = []
    for line in lines:
        *place, time_us = line.split(",")
        factor = 100 if place[2] == "0" else 1
        slow.append(",".join([*place, str(factor * float(time_us))]))
    (folder / "attention.csv").write_text("\n".join([head, *slow]) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["folder", "verifying_folder", "slow_prompts_folder"])
@given(rows=st.integers(1, 128), before=st.integers(1, 6000))
def test_more_drafts_never_take_less_time_and_none_take_that_of_a_decode_step(
    folder: Path, verifying_folder: Path, slow_prompts_folder: Path, kind: str, rows: int, before: int
) -> None:
    tables = {"folder": folder, "verifying_folder": verifying_folder}.get(kind, slow_prompts_folder)
    times = [forward_ns(tables, verification(rows, before, number)) for number in range(9)]
    assert times == sorted(times)
    assert times[0] == forward_ns(folder, decode_batch(rows, rows * (before + 1)))


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 7])
def test_measured_query_tokens_price_the_attention_of_a_verification(
    verifying_folder: Path, num_draft_tokens: int
) -> None:
    """On a measured number of query tokens, between two of them, and beyond the last."""
    query_tokens = num_draft_tokens + 1
    attention = verification_us(query_tokens, 8, 99 + query_tokens)
    expected = step_us(LAYERS, 8 * query_tokens, 8 * query_tokens, attention)
    forward = forward_ns(verifying_folder, verification(8, 99, num_draft_tokens))
    assert forward == pytest.approx(expected * 1e3, abs=1)


def test_without_them_arithmetic_bounds_the_attention_of_a_verification(slow_prompts_folder: Path) -> None:
    """Eight rows of 500 tokens with 7 drafts each."""
    history = 500 + 8 / 2 - 64 / 2
    expected = step_us(LAYERS, 64, 64, 100 * attention_us(64, history, 0, 0))
    assert forward_ns(slow_prompts_folder, verification(8, 500, 7)) == pytest.approx(expected * 1e3, abs=1)


def test_tables_that_cannot_price_a_verification_are_refused_for_speculation_alone(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tp1")
    lines = (folder / "attention.csv").read_text(encoding="utf-8").splitlines()
    rows_alone = [line for line in lines if line.startswith(("prefill_chunk", "0,"))]
    (folder / "attention.csv").write_text("\n".join(rows_alone) + "\n", encoding="utf-8")
    assert forward_ns(folder, decode_batch(8, 800)) > 0
    drafts = {"num_speculative_tokens": 2, "acceptance": 0.8, "draft_cost": 0.1}
    config = SimConfig(cost_model="layer-profile", layer_profile=str(folder), max_num_seqs=64, **drafts)
    with pytest.raises(
        UsageError, match=r"neither decoding rows of several query tokens \(decode_q_len\) nor prompts"
    ):
        cost_model_for(config)


@given(rows=st.integers(1, 64), mean=st.integers(1, 6000), later=st.integers(0, 20_000))
def test_a_stretch_of_decode_steps_costs_what_its_steps_cost(
    folder: Path, rows: int, mean: int, later: int
) -> None:
    model = cost_model_for(_config(folder))

    stretch = model.decode(decode_batch(rows, rows * mean))
    assert stretch.since <= rows * mean
    context = rows * mean + later
    if stretch.until is None or context < stretch.until:
        assert stretch.cost_at(context) == model.price(decode_batch(rows, context))


def test_measured_layers_need_a_folder_of_the_same_parallelism_and_nothing_else_takes_one(folder: Path) -> None:
    named = {"layer_profile": str(folder)}
    for options, message in (
        ({"cost_model": "layer-profile"}, "name them with layer_profile"),
        (
            {"cost_model": "roofline", **named},
            "roofline does not read layer_profile; drop it, or take layer-profile",
        ),
        ({"cost_model": "layer-profile", **named, "value_model": "qwen2.5-1.5b"}, "cannot price a value model"),
    ):
        with pytest.raises(ValidationError, match=message):
            SimConfig(**options)
    with pytest.raises(UsageError, match="name the tables of the same degree"):
        cost_model_for(SimConfig(cost_model="layer-profile", **named, tensor_parallel_size=2))


@pytest.fixture(scope="module")
def skewed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tables(tmp_path_factory.mktemp("skewed") / "tp1")
    mean_us, longest_us = (attention_us(0, 0, 8, context) for context in (88, 256))
    batch = (8, 0, 64, 256, 88, mean_us, longest_us, 0.75 * mean_us + 0.25 * longest_us)
    lines = ["n,pc,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us", ",".join(map(str, batch))]
    (folder / "skew.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_a_simulation_of_unequal_rows_is_the_same_in_leaps_and_in_steps(skewed_folder: Path) -> None:
    config = _config(skewed_folder)
    requests = tuple(request_of(f"r{i}", prompt_tokens=40 * i + 5, max_tokens=300 - 20 * i) for i in range(9))
    leaps = simulate(config, [SimLoad(requests=requests)])
    engine = SimulatedEngine(config)
    for request in requests:
        engine.add_request(request)
    steps = []
    while engine.has_work:
        steps.append(engine.step().record)
    assert [step.dur_ns for step in leaps.steps] == [step.dur_ns for step in steps]
