"""What a step costs: published constants, rooflines, fitted models, measured layers, and noise."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError
from support.layer_tables import attention_us, step_us, verification_us, write_tables
from support.servers.simulator import (
    FILTERED,
    MIXED_BATCH,
    NEUTRAL,
    VALUE_MODEL,
    announced_log_of,
    decode_batch,
    request_of,
    run,
)
from support.step_time import fitted_model

from benchctl.costs.hardware import hardware_for
from benchctl.costs.roofline import weight_read_bytes
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.records.files import encode
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad
from benchctl.sim.costs.cost_model import StepBatch, cost_model_for, published_noise
from benchctl.sim.costs.fitted import decode_work
from benchctl.sim.simulation import simulate
from benchctl.steptime.model import write_model
from benchctl.steptime.work import Deployment, StepWork

MODEL = fitted_model(
    steps_us=150.0, draws=((1.6, 1.25, 1.0, 30.0, 20.0, 150.0), (1.4, 1.3, 1.0, 29.0, 22.0, 160.0))
)
DEPLOYMENT = Deployment(shape=shape_for("qwen2.5-7b"), hardware=hardware_for("h100-sxm"))
LAYERS = 28
"""Of qwen2.5-7b."""
CONSTANT = ("lenvm-h100", "roofline", "llm-mock")
MEASURED = ("fitted", "layers", "verifications", "slow prompts")


@pytest.fixture(scope="module", name="files")
def _files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A fitted model, measured layers, those with verifications, and those whose prompts take 100 times as long."""
    path = tmp_path_factory.mktemp("priced")
    write_model(path / "model.json", MODEL)
    verifying = write_tables(path / "verifying" / "tp1", measures_key=True, query_tokens=(2, 5))
    slow = write_tables(path / "slow" / "tp1")
    head, *lines = (slow / "attention.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines]
    cells = [[*place, str((100 if place[2] == "0" else 1) * float(time_us))] for *place, time_us in rows]
    (slow / "attention.csv").write_text("\n".join([head, *map(",".join, cells)]) + "\n")
    layers = write_tables(path / "plain" / "tp1")
    return dict(zip(MEASURED, (path / "model.json", layers, verifying, slow), strict=True))


def fitted(file: Path, **options: object) -> SimConfig:
    return SimConfig(cost_model="fitted", step_time_model=str(file), **options)


def layered(folder: Path, **options: object) -> SimConfig:
    return SimConfig(cost_model="layer-profile", layer_profile=str(folder), max_num_seqs=64, **options)


def forward_ns(config: SimConfig, batch: StepBatch) -> int:
    return cost_model_for(config).price(batch).model_forward


def test_a_roofline_step_takes_the_larger_of_the_times_of_its_memory_and_its_arithmetic() -> None:
    shape = shape_for("qwen2.5-7b")
    step = run([request_of("r", prompt_tokens=10, max_tokens=3)], cost_model="roofline").steps[1]
    num_bytes = shape.weight_bytes() - 2 * shape.vocab * shape.hidden + shape.kv_bytes_per_token() * (11 + 1)
    assert step.sections_ns["model_forward"] == pytest.approx(num_bytes / 3350e9 * 1e9, rel=1e-3)
    step = run([request_of("r", prompt_tokens=4096, max_tokens=1)], cost_model="roofline").steps[0]
    flops = (
        shape.linear_flops_per_token() * 4096
        + shape.attention_flops_per_position() * 4096 * 4097 // 2
        + shape.lm_head_flops()
    )
    assert step.sections_ns["model_forward"] == pytest.approx(flops / 989.4e12 * 1e9, abs=1)


def test_steps_cost_more_with_a_larger_base_or_value_model() -> None:
    requests = [request_of(f"r{i}", max_tokens=30, sampling=FILTERED, guidance=NEUTRAL) for i in range(4)]
    sizes = ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b"]
    for cost_model in ("roofline", "lenvm-h100"):
        for pairs in ([(size, VALUE_MODEL) for size in sizes], [("qwen2.5-7b", size) for size in sizes]):
            totals_ns = [
                run(requests, model=model, value_model=value_model, cost_model=cost_model).makespan_ns()
                for model, value_model in pairs
            ]
            assert totals_ns == sorted(set(totals_ns)), (cost_model, pairs)


def test_guided_roofline_steps_price_the_value_model() -> None:
    requests = [request_of("r", prompt_tokens=50, max_tokens=20, sampling=FILTERED, guidance=NEUTRAL)]
    steps = run(requests, cost_model="roofline", value_model=VALUE_MODEL).steps
    weights_ns = weight_read_bytes(shape_for(VALUE_MODEL).as_value_model()) / 3350e9 * 1e9
    scored = [step for step in steps if step.guided_rows]
    assert "value_model_load" in scored[0].sections_ns
    assert all(step.sections_ns["lvm_forward"] >= weights_ns for step in scored)
    assert all("lvm_forward" not in step.sections_ns for step in steps if not step.guided_rows)


@pytest.mark.parametrize(("has_value_model", "cv"), [(False, 0.14), (True, 0.018)])
def test_server_lives_vary_as_published(has_value_model: bool, cv: float) -> None:
    lives = []
    for seed in range(400):
        noise = published_noise(seed, has_value_model=has_value_model)
        lives.append(statistics.fmean(noise() for _ in range(100)))
    assert statistics.fmean(lives) == pytest.approx(1.0, abs=0.02)
    assert statistics.stdev(lives) / statistics.fmean(lives) == pytest.approx(cv, rel=0.12)


def test_noise_changes_times_and_nothing_else_and_without_overlap_a_step_takes_longer_by_its_scheduling() -> None:
    requests = [request_of("r", max_tokens=20)]
    quiet, noisy, off = (
        run(requests, **options).steps
        for options in ({}, {"noise": "published", "noise_seed": 3}, {"overlap_schedule": False})
    )
    assert [step.context_tokens for step in quiet] == [step.context_tokens for step in noisy]
    for a, b in zip(quiet, noisy, strict=True):
        assert a.dur_ns != b.dur_ns == sum(b.sections_ns[n] for n in ("schedule", "model_forward", "sampler_total"))
    on_ns, off_ns = quiet[1].sections_ns["schedule"], off[1].sections_ns["schedule"]
    assert off[1].dur_ns - quiet[1].dur_ns == off_ns - on_ns == 1_000_000


@pytest.mark.parametrize("name", [*CONSTANT, "fitted", "layers"])
@given(rows=st.integers(1, 2000), mean=st.integers(1, 9000), later=st.integers(0, 2000), greedy=st.booleans())
def test_the_lines_of_a_decode_stretch_are_the_price_of_its_steps(
    files: dict[str, Path], name: str, rows: int, mean: int, later: int, greedy: bool
) -> None:
    if name in CONSTANT:
        config = SimConfig(cost_model=name)
    else:
        config, rows = fitted(files[name]) if name == "fitted" else layered(files[name]), min(rows, 300)
    model = cost_model_for(config)

    def batch(length: int) -> StepBatch:
        return decode_batch(rows, rows * length, is_greedy=greedy, longest_context=length, most_new_tokens=1)

    stretch = model.decode(batch(mean))
    per_row = 1 if model.rules.pads_batches else rows
    assert stretch.since <= per_row * mean
    x = mean + later
    if stretch.until is None or per_row * x < stretch.until:
        assert stretch.cost_at(per_row * x) == model.price(batch(x))


def test_a_step_takes_what_the_fitted_model_predicts_for_its_work_and_each_server_life_may_draw_coefficients(
    files: dict[str, Path],
) -> None:
    work = StepWork(
        num_prefills=2,
        prefill_tokens=100,
        prefill_context=20 + 180,
        prefill_positions=60 * (20 + 30) + 40 * (180 + 20),
        num_decodes=5,
        decode_tokens=5,
        decode_context=5 * 119,
        decode_positions=5 * 119.5,
        num_sampled=6,
    )
    expected_us = MODEL.predict_us(work, DEPLOYMENT)
    assert cost_model_for(fitted(files["fitted"])).price(MIXED_BATCH).sections() == {
        "schedule": 0,
        "model_forward": pytest.approx(expected_us * 1e3, abs=1),
    }
    lives = [
        forward_ns(fitted(files["fitted"], noise="fitted", noise_seed=seed), decode_batch(8, 8000))
        for seed in range(3)
    ]
    assert lives[0] == lives[2] != lives[1]


def test_decodes_and_verifications_of_a_simulation_are_the_fitted_models_predictions(
    files: dict[str, Path],
) -> None:
    requests = tuple(request_of(f"r{i}", prompt_tokens=50 + 30 * i, max_tokens=60, seed=i) for i in range(9))
    drafting = {"num_speculative_tokens": 3, "acceptance": 0.7, "draft_cost": 0.1, "backfill": "prefill"}
    for new, options in ((1, {}), (4, drafting)):
        steps = simulate(fitted(files["fitted"], **options), [SimLoad(requests=requests)]).steps
        decodes = [step for step in steps if step.phase == "decode"]
        assert len(decodes) > 15
        for step in decodes:
            rows, tokens = step.num_seqs, step.num_decode_tokens or 0
            assert tokens == new * rows
            cached = (step.context_tokens or 0) - tokens
            work = StepWork(
                num_decodes=rows,
                decode_tokens=tokens,
                decode_context=cached,
                decode_positions=new * cached + rows * new * new / 2,
                num_sampled=tokens,
            )
            expected_us = MODEL.predict_us(work, DEPLOYMENT)
            assert step.sections_ns["model_forward"] == pytest.approx(expected_us * 1e3, abs=1)
            passes = (decode_work(rows, cached + rows * (i + 1)) for i in range(new - 1))
            draft_us = 0.1 * sum(MODEL.predict_us(each, DEPLOYMENT) for each in passes)
            assert step.sections_ns.get("draft", 0) == pytest.approx(draft_us * 1e3, abs=2)


def test_files_and_devices_that_do_not_fit_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    several = tmp_path / "several.json"
    write_model(several, replace(MODEL, tensor_parallel=(1, 2)))
    for config, message in (
        (fitted(tmp_path / "absent.json"), "steptime fit"),
        (fitted(files["fitted"], hardware="a100-sxm"), r"h100-sxm.*a100-sxm"),
        (fitted(several, tensor_parallel_size=4), "tensor-parallel sizes 1, 2 and the deployment has 4"),
        (layered(files["layers"], tensor_parallel_size=2), "name the tables of the same degree"),
    ):
        with pytest.raises(UsageError, match=message):
            cost_model_for(config)
    assert cost_model_for(fitted(several, tensor_parallel_size=2)).decode is not None
    layers = {"layer_profile": str(files["layers"])}
    for options, message in (
        ({"cost_model": "fitted"}, "name them with step_time_model"),
        ({"noise": "fitted"}, "take none or published"),
        ({"cost_model": "roofline", "tensor_parallel_size": 2}, "roofline prices one device; drop it, or take"),
        ({"cost_model": "layer-profile"}, "name them with layer_profile"),
        ({"cost_model": "roofline", **layers}, "roofline does not read layer_profile; drop it, or take layer-"),
        ({"cost_model": "layer-profile", **layers, "value_model": VALUE_MODEL}, "cannot price a value model"),
    ):
        with pytest.raises(ValidationError, match=message):
            SimConfig(**options)


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


def test_steps_take_the_times_of_their_measured_layers_on_measured_sizes_between_them_and_beyond(
    files: dict[str, Path],
) -> None:
    """Verifications are of eight rows: by their own times where they were measured, else bounded by prompts."""
    history = (60 * (20 + 30) + 40 * (180 + 20)) / 100 - 50
    cases = [
        ("layers", MIXED_BATCH, (112, 7, attention_us(100, history, 5, 120))),  # padded to a graph of 112 tokens
        ("layers", verification(8, 99, 3), (32, 32, attention_us(0, 0, 8, 103))),
        ("slow prompts", verification(8, 500, 7), (64, 64, 100 * attention_us(64, 500 + 8 / 2 - 64 / 2, 0, 0))),
    ]
    for query_tokens in (2, 3, 5, 8):
        attention = verification_us(query_tokens, 8, 99 + query_tokens)
        layers = (8 * query_tokens, 8 * query_tokens, attention)
        cases.append(("verifications", verification(8, 99, query_tokens - 1), layers))
    for name, batch, layers in cases:
        expected = step_us(LAYERS, *layers)
        sections = cost_model_for(layered(files[name])).price(batch).sections()
        assert sections == {"schedule": 0, "model_forward": pytest.approx(expected * 1e3, abs=1)}, (name, layers)


@pytest.mark.parametrize("name", ["layers", "verifications", "slow prompts"])
@settings(max_examples=40)
@given(rows=st.integers(1, 128), before=st.integers(1, 6000))
def test_more_drafts_never_take_less_time_and_none_take_that_of_a_decode_step(
    files: dict[str, Path], name: str, rows: int, before: int
) -> None:
    times = [forward_ns(layered(files[name]), verification(rows, before, number)) for number in range(9)]
    assert times == sorted(times)
    assert times[0] == forward_ns(layered(files["layers"]), decode_batch(rows, rows * (before + 1)))


def test_tables_that_cannot_price_a_verification_are_refused_for_speculation_alone(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tp1")
    lines = (folder / "attention.csv").read_text().splitlines()
    (folder / "attention.csv").write_text(
        "\n".join(s for s in lines if s.startswith(("prefill_chunk", "0,"))) + "\n"
    )
    assert forward_ns(layered(folder), decode_batch(8, 800)) > 0
    config = layered(folder, num_speculative_tokens=2, acceptance=0.8, draft_cost=0.1)
    with pytest.raises(
        UsageError, match=r"neither decoding rows of several query tokens \(decode_q_len\) nor prom"
    ):
        cost_model_for(config)


def test_a_simulation_of_unequal_rows_is_the_same_in_leaps_and_in_steps(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tp1")
    mean_us, longest_us = (attention_us(0, 0, 8, context) for context in (88, 256))
    batch = (8, 0, 64, 256, 88, mean_us, longest_us, 0.75 * mean_us + 0.25 * longest_us)
    header = "n,pc,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us"
    (folder / "skew.csv").write_text(f"{header}\n{','.join(map(str, batch))}\n")
    requests = tuple(request_of(f"r{i}", prompt_tokens=40 * i + 5, max_tokens=300 - 20 * i) for i in range(9))
    config, load = layered(folder), SimLoad(requests=requests)
    assert [encode(step) for step in simulate(config, [load]).steps] == announced_log_of(config, load)
