"""Operators: what their kernels do, fits that return planted coefficients, and measured tables."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.steptime.features import all_reduce_us, kernel_name
from benchmarks.steptime.operator_models import (
    EXPERT_COLUMNS,
    ExpertBlock,
    Gemm,
    LatentDecode,
    OperatorTime,
    expert_block_columns,
    fit_operator,
    gemm_columns,
    halves,
    latent_decode_columns,
    mape_frac,
    power_law_load,
)
from benchmarks.steptime.operators import results

H100 = hardware_for("h100-sxm")
DATA = Path(__file__).parents[2] / "../shared/data"


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "aiconfigurator").is_dir(), reason=f"measured tables are not in {DATA}")
def test_operators_predict_measured_tables_that_they_were_not_fitted_to() -> None:
    errors = {(row["operator"], row["device"], row["note"]): row for row in results(DATA)}
    missed = {key for key, row in errors.items() if row["holds"] == "no"}
    assert not missed
    for row in errors.values():
        assert row["error %"] < row["roofline error %"] / 3


@pytest.mark.parametrize("has_launch", [False, True])
def test_a_fit_returns_planted_coefficients(has_launch: bool) -> None:
    stream = np.random.default_rng(1)
    columns = np.column_stack([np.ones(400), stream.lognormal(3, 2, 400), stream.lognormal(2, 2, 400)])
    planted = OperatorTime(coefficients=(12.0, 1.3, 0.7), launch_us=60.0 if has_launch else 0.0)
    measured_us = planted.predict_us(columns) * stream.lognormal(0, 0.01, 400)
    measured_us[::50] *= 8  # stalled measurements
    fit = fit_operator(columns, measured_us, has_launch=has_launch)
    assert fit.coefficients == pytest.approx(planted.coefficients, rel=0.06)
    assert fit.launch_us == pytest.approx(planted.launch_us, rel=0.02)


def test_too_few_operators_are_refused() -> None:
    with pytest.raises(
        UsageError, match="2 measured operators do not determine 3 coefficients; measure more sizes"
    ):
        fit_operator(np.ones((2, 2)), np.ones(2), has_launch=True)


def test_halves_keep_equal_shapes_together() -> None:
    keys = np.array([[1, 2], [1, 2], [3, 4], [5, 6], [3, 4]])
    assert halves(keys).tolist() == [True, True, False, True, False]
    assert mape_frac(np.array([1.1, 0.9]), np.array([1.0, 1.0])) == pytest.approx(0.1)


@given(
    tokens=st.integers(1, 4096),
    experts=st.sampled_from([8, 64, 256]),
    chosen=st.integers(1, 8),
    devices=st.sampled_from([1, 2, 8]),
)
def test_a_routing_reaches_between_the_experts_of_one_token_and_all(
    tokens: int, experts: int, chosen: int, devices: int
) -> None:
    load = power_law_load(tokens, experts, chosen, alpha=1.2, devices=devices)
    assert min(1.0, chosen / devices) <= load.experts <= experts / devices
    # Every expert that is reached computes one block at least, and wastes less than one.
    assert load.padded_choices >= 16 * (load.experts - chosen) - 1e-9
    assert load.padded_choices <= tokens * chosen + experts + 32 * load.experts + 1e-9
    assert load == power_law_load(tokens, experts, chosen, alpha=1.2, devices=devices)


def test_a_block_of_experts_reads_those_that_it_reaches() -> None:
    def calls(tokens: int, devices: int) -> ExpertBlock:
        return ExpertBlock(
            tokens=np.array([tokens]),
            hidden=np.array([4096.0]),
            expert_ffn=np.array([14336.0]),
            experts=np.array([8]),
            experts_per_token=np.array([2]),
            tensor_parallel=np.array([devices]),
            expert_parallel=np.array([1]),
            alpha=np.array([1.01]),
        )

    many = dict(zip(EXPERT_COLUMNS, expert_block_columns(calls(4096, 1), H100)[0], strict=True))
    assert many["weights"] == pytest.approx(8 * 3 * 4096 * 14336 * 2 / 3350e9 * 1e6)
    assert many["tuned"] == 0  # no tuned kernel for whole experts of Mixtral
    assert many["untuned"] == pytest.approx(4096 * 2 * 6 * 4096 * 14336 / 989.4e12 * 1e6, rel=0.02)
    halved = dict(zip(EXPERT_COLUMNS, expert_block_columns(calls(4096, 2), H100)[0], strict=True))
    assert (halved["untuned"], halved["tuned"]) == (0, pytest.approx(many["untuned"] / 2))
    one = dict(zip(EXPERT_COLUMNS, expert_block_columns(calls(1, 1), H100)[0], strict=True))
    assert one["weights"] == pytest.approx(many["weights"] / 4)


def test_a_decoding_latent_attention_reads_the_cache_once_for_all_heads() -> None:
    latent = shape_for("deepseek-v3").latent
    assert latent is not None
    calls = LatentDecode(
        rows=np.array([4.0, 4.0]), heads=np.array([1.0, 128.0]), context=np.array([1000.0, 1000.0])
    )
    few, many = latent_decode_columns(calls, latent, H100)
    assert few[1] == many[1] == pytest.approx(4 * 1000 * 576 * 2 / 3350e9 * 1e6)
    assert many[2] == pytest.approx(4 * 1000 * 128 * 2 * (576 + 512) / 989.4e12 * 1e6)
    assert few[2] == many[2] / 8  # one head fills a tile of 16


def test_a_matrix_product_is_bound_by_one_of_both_and_computes_whole_tiles() -> None:
    sizes = Gemm(m=np.array([1.0, 130.0, 256.0, 4096.0]), n=np.full(4, 8192.0), k=np.full(4, 8192.0))
    columns = gemm_columns(sizes, H100)
    assert (columns[:, 0] > 0).tolist() == (columns[:, 1] == 0).tolist() == [False, False, False, True]
    assert columns[0, 1] == pytest.approx((8192**2 + 2 * 8192) * 2 / 3350e9 * 1e6)
    assert columns[3, 0] == pytest.approx(2 * 4096 * 8192**2 / 989.4e12 * 1e6)
    compute = Gemm(m=np.array([1025.0, 1152.0]), n=np.full(2, 8192.0), k=np.full(2, 8192.0))
    one_more, whole_tile = gemm_columns(compute, H100)[:, 0]
    assert one_more == whole_tile


@given(st.integers(1, 10**9), st.sampled_from([2, 4, 8]))
def test_an_all_reduce_never_beats_its_links_nor_its_floor(num_bytes: int, devices: int) -> None:
    for name in ("h100-sxm", "a100-sxm", "l40s"):
        hardware = hardware_for(name)
        time_us = all_reduce_us(float(num_bytes), hardware, devices)
        assert time_us > 4
        assert time_us > 2 * (devices - 1) / devices * num_bytes / hardware.link_bytes_per_s * 1e6
        array = all_reduce_us(np.array([float(num_bytes)] * 2), hardware, devices)
        assert array == pytest.approx([time_us, time_us])


def test_engines_choose_the_kernel_by_size_and_devices() -> None:
    assert [kernel_name(size, 4) for size in (1e3, 6e5, 1e7)] == ["one_shot", "two_shot", "ring"]
    assert [kernel_name(size, 2) for size in (1e3, 6e5, 1e7)] == ["one_shot", "one_shot", "ring"]
    assert kernel_name(3e5, 8) == "two_shot"
