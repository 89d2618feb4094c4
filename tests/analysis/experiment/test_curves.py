"""Curves over the load, and their knees: those of servers whose step takes a + b N are at N = a / b."""

import math

import pytest
from hypothesis import given, settings, strategies as st
from support.results.builders import edit_run, write_results
from support.results.curves import KNEES, SIZES, write_curves

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.experiment.curves import corner, vertex
from benchctl.records.schema import ResultWarning


def log_powers(sizes, knee, scale=1.0):
    """ln(throughput / latency) of closed loops on a server whose step takes a + b N, with a / b the knee."""
    throughput = [scale * n / (knee + n) for n in sizes]
    return [math.log(x / (n / x)) for x, n in zip(throughput, sizes, strict=True)]


loads = st.tuples(st.floats(1.5, 4.0), st.floats(0.1, 10.0), st.floats(0.0, 1.0))
"""Distance of neighbouring loads, the smallest load, and where between two loads the knee is."""


def ladder(distance, smallest):
    return [smallest * distance**i for i in range(round(9 / math.log(distance)))]


@settings(deadline=None)
@given(loads)
def test_the_knee_of_a_linear_step_time_is_where_fixed_and_growing_parts_are_equal(load):
    distance, smallest, between = load
    sizes = ladder(distance, smallest)
    knee = sizes[len(sizes) // 2] * distance**between
    assert vertex(sizes, log_powers(sizes, knee)) == pytest.approx(knee, rel=0.008)


@settings(deadline=None)
@given(loads, st.floats(1e-3, 1e3))
def test_a_knee_changes_neither_with_units_nor_with_larger_loads_that_are_added(load, scale):
    distance, smallest, between = load
    sizes = ladder(distance, smallest)
    knee = sizes[len(sizes) // 2] * distance**between
    before = vertex(sizes, log_powers(sizes, knee))
    larger = [*sizes, *(sizes[-1] * distance**i for i in (1, 2, 3))]
    assert vertex(larger, log_powers(larger, knee, scale)) == pytest.approx(before, rel=1e-6)
    slower = vertex([7 * n for n in sizes], log_powers(sizes, knee))
    assert slower == pytest.approx(7 * before, rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "knee", "where"),
    [
        ((1, 2, 4), 64, "beyond 4, the largest load"),
        ((16, 32, 64), 2, "beyond 16, the smallest load"),
        ((1, 2), 1.2, "beyond 1, the smallest load"),
        ((1, 8, 16), 8, "between 1 and 8, which are 8 times apart"),
        ((4, 16, 128), 20, "between 16 and 128, which are 8 times apart"),
    ],
)
def test_loads_that_do_not_hold_the_knee_say_where_it_must_be(sizes, knee, where):
    assert vertex(sizes, log_powers(sizes, knee)) == where


@settings(deadline=None)
@given(loads, st.floats(1.5, 100.0))
def test_slots_that_end_make_a_corner_and_a_step_that_grows_makes_none(load, headroom):
    distance, smallest, between = load
    sizes = ladder(distance, smallest)
    top = sizes[len(sizes) // 2] * distance**between
    assert corner(sizes, log_powers(sizes, top)) is None
    doubling = [top * 2.0**i for i in range(-5, 5)]
    full = [min(n, 1.3 * top) / (headroom * 1.3 * top + min(n, 1.3 * top)) for n in doubling]
    assert corner(doubling, [math.log(x * x / n) for x, n in zip(full, doubling, strict=True)]) in {top, 2 * top}


def test_a_power_that_rises_twice_has_no_clear_maximum():
    assert vertex((1, 2, 4, 8, 16), (0.0, -2.0, 0.1, -2.0, 0.0)) == "near 4, without a clear maximum"


@pytest.fixture(name="curves", scope="module")
def _curves(tmp_path_factory):
    path = tmp_path_factory.mktemp("curves") / "r"
    write_curves(path, blocks=6)
    return analyze_directory(path).curves


def test_each_arm_has_a_curve_over_its_loads_the_baseline_first(curves):
    assert [curve.label for curve in curves] == ["baseline", "wide"]
    for curve in curves:
        assert list(curve.cells) == list(SIZES)
        assert (curve.factor, curve.unit) == ("max_concurrency", "open requests")
        for size, levels in curve.levels.items():
            assert levels["throughput"].value == curve.cells[size].centre("output_throughput")
            assert levels["speed"].value == 1000 / levels["tpot"].value
            assert all(level.low < level.value < level.high for level in levels.values())


def test_the_knee_is_known_much_better_than_the_throughput_of_servers_that_scatter(curves):
    for curve in curves:
        throughput = curve.levels[16]["throughput"]
        assert curve.knee.low < KNEES[curve.label] * 1.003
        assert curve.knee.high > KNEES[curve.label] * 0.997
        assert curve.knee.high / curve.knee.low < 1.025 < throughput.high / throughput.low
        assert min(curve.knees.values()) < curve.knee.value < max(curve.knees.values())


def test_a_server_whose_slots_end_has_no_knee_and_names_the_corner(tmp_path):
    full = {16: 2 * 48 / 56, 32: 4 * 48 / 72}  # a step of 40 + N, of which 8 slots take 2 and 4
    sizes = (1, 2, 4, 8, 16, 32)
    write_curves(tmp_path / "r", sizes=sizes, knees={"baseline": 40}, factor=lambda _v, _b, n: full.get(n, 1))
    (curve,) = analyze_directory(tmp_path / "r").curves
    assert curve.knee == "a corner near 8, beyond which throughput does not grow"


def test_a_launch_that_slows_all_loads_of_a_server_by_the_same_leaves_its_knee(tmp_path):
    write_curves(tmp_path / "r", sizes=(4, 8, 16, 32), factor=lambda _variant, block, _size: 1 + 0.2 * block)
    for curve in analyze_directory(tmp_path / "r").curves:
        throughput = curve.levels[4]["throughput"]
        assert throughput.high / throughput.low > 1.3
        assert curve.knee.high / curve.knee.low < 1.001


def test_a_curve_between_two_points_is_straight_in_logarithms(curves):
    first, second = curves[0].levels[4], curves[0].levels[8]
    for name, level in first.items():
        assert curves[0].at(math.sqrt(32), name) == pytest.approx(math.sqrt(level.value * second[name].value))
        assert curves[0].at(4, name) == pytest.approx(level.value)
        assert curves[0].at(0.1, name) == pytest.approx(curves[0].levels[1][name].value)


def test_loads_that_end_below_the_knee_have_none_and_name_the_blocks(tmp_path):
    write_curves(tmp_path / "r", sizes=(1, 2, 4))
    first, second = analyze_directory(tmp_path / "r").curves
    reason = "beyond 4, the largest load, in 3 of 3 blocks; add such loads to sweep.max_concurrency"
    assert first.knee == second.knee == reason


def test_a_block_that_lacks_a_load_counts_at_its_other_points_and_not_for_the_knee(tmp_path):
    results = write_curves(tmp_path / "r", sizes=(4, 8, 16, 32))
    lost = next(run for run in results.plan().runs if run.block == 1 and run.cell["max_concurrency"] == 8)
    cold = ResultWarning(code="warmup-failed", message="it did")
    edit_run(results, lost.run_id, state="suspect", warnings=(cold,))
    first, second = analyze_directory(tmp_path / "r").curves
    assert [cell.spreads["e2el_ms"].n for cell in first.cells.values()] == [3, 2, 3, 3]
    assert (list(first.knees), list(second.knees)) == ([0, 2], [0, 1, 2])


def test_each_other_load_factor_and_each_server_setting_has_a_curve_of_its_own(tmp_path):
    cells = ({"input_len": 16, "top_k": 1}, {"input_len": 32, "top_k": 1})
    write_curves(tmp_path / "r", other=cells, blocks=2, sizes=(4, 8, 16))
    assert [curve.label for curve in analyze_directory(tmp_path / "r").curves] == [
        f"{label} input_len={length}, top_k=1" for label in KNEES for length in (16, 32)
    ]


def test_a_directory_without_a_swept_load_has_no_curve(tmp_path):
    write_results(tmp_path / "r", cells=({"top_k": 1}, {"top_k": 5}))
    assert analyze_directory(tmp_path / "r").curves == ()
