"""Which tokens may be sampled, and what values do to them: known vectors, an independent reference, and laws."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st
from support.guided.guidance_reference import candidates as reference, guided, mean, softmax
from support.guided.tensors import torch

from benchctl.guided.modes import (
    length_of_value,
    log_tilt,
    mode_batch,
    target_value,
    value_of_length,
)
from benchctl.guided.params import EXPECTATION_MODES, EXPONENTIAL_MODES, MODES, GuidanceParams
from benchctl.guided.rows import Candidates, limit_numbers, select_candidates

P, V = [0.5, 0.3, 0.15, 0.05], [0.2, 0.35, 0.6, 0.1]
VECTORS = [
    ("centered_exp", 0.0, P, V, [0.5, 0.3, 0.15, 0.05]),
    ("centered_exp", 0.001, P, V, [0.49995, 0.300015, 0.15004501, 0.04999]),
    ("centered_exp", 1.0, P, V, [0.44740093, 0.31188343, 0.20023313, 0.04048251]),
    ("centered_exp", -100.0, P, V, [0.00045379, 0.0, 0.0, 0.99954621]),
    ("value_bias", 0.5, P, V, [0.37284595, 0.32831295, 0.2739847, 0.0248564]),
    ("mul", 0.5, P, V, [0.47936873, 0.00823047, 1.102e-05, 0.51238978]),
    ("mul", 1.0, P, V, [0.5, 0.3, 0.15, 0.05]),
    ("mul", 1.2, P, V, [0.3665763, 0.31588252, 0.28874348, 0.0287977]),
    ("mul", 0.0, P, V, [0.5, 0.3, 0.15, 0.05]),
    ("linear", 0.5, P, V, [0.70951187, 0.1058011, 0.00519708, 0.17948995]),
    ("exp", 0.5, P, V, [0.69998214, 0.14580883, 0.01250249, 0.14170654]),
    ("length_mul", 1.5, P, V, [0.25876315, 0.29488261, 0.42948203, 0.01687221]),
    ("centered_exp", 1.0, [0.6, 0.4], [0.2, 0.8], [0.4515190726543788, 0.5484809273456213]),
]
"""mode, scale, p, v, p', to eight digits."""
laws = settings(deadline=None, max_examples=40)
DTYPES = st.sampled_from([torch.float32, torch.float64])
PRECISIONS = [(torch.float64, 1e-6), (torch.float32, 1e-5)]
NEUTRAL = {mode: 0.0 if mode in EXPONENTIAL_MODES else 1.0 for mode in MODES}


def tilt(probs: Any, values: Any, raw: Any, mask: Any, batch: Any) -> Any:
    """p' of each row, and p itself, bit for bit, in rows that nothing changes."""
    log_probs, is_unchanged = log_tilt(probs, values, raw, mask, batch)
    return torch.where(is_unchanged, probs, torch.exp(log_probs))


def steer(
    p: list[float],
    v: list[float],
    params: GuidanceParams,
    *,
    z: list[float] | None = None,
    generated: int = 0,
    dtype: Any = torch.float64,
) -> list[float]:
    """p' of a single row."""
    probs, values = torch.tensor([p], dtype=dtype), torch.tensor([v], dtype=dtype)
    raw = torch.logit(values, eps=1e-12) if z is None else torch.tensor([z], dtype=dtype)
    batch = mode_batch([params], "cpu", [generated])
    return tilt(probs, values, raw, probs > 0, batch)[0].tolist()


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], list[float], list[float]]:
    """p, v and z of candidates, some of them extreme, equal or improbable."""
    count = draw(st.integers(1, 8))
    weights = draw(st.lists(st.floats(1e-9, 1.0), min_size=count, max_size=count))
    total = math.fsum(weights)
    outputs = st.one_of(st.floats(-6, 6), st.sampled_from([-30.0, -3.0, 0.0, 3.0, 30.0]))
    z = draw(st.lists(outputs, min_size=count, max_size=count))
    return [weight / total for weight in weights], [1 / (1 + math.exp(-each)) for each in z], z


GUIDANCES = st.builds(
    GuidanceParams,
    mode=st.sampled_from(MODES),
    value_scale=st.floats(-3, 3) | st.sampled_from([0.0, 1.0, -100.0, 100.0]),
    gamma=st.sampled_from([0.9, 0.997, 0.9998]),
    value_min=st.none() | st.floats(0, 1),
    target_value=st.none() | st.floats(0, 1),
    target_length=st.none() | st.floats(0, 3000),
    target_length_mode=st.sampled_from(["total", "remaining"]),
    value_constraint=st.sampled_from(["eq", "ge", "le", "eq_soft"]),
)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_every_known_vector_is_met(dtype: Any, tolerance: float) -> None:
    for mode, scale, p, v, expected in VECTORS:
        found = steer(p, v, GuidanceParams(mode=mode, value_scale=scale), dtype=dtype)
        assert found == pytest.approx(expected, abs=tolerance), (mode, scale)


@laws
@given(rows(), GUIDANCES, st.integers(0, 2000))
def test_every_row_agrees_with_the_reference(
    row: tuple[list[float], list[float], list[float]], params: GuidanceParams, generated: int
) -> None:
    p, v, z = row
    assume(_is_steady(p, v, params))
    found = steer(p, v, params, z=z, generated=generated)
    expected = guided(p, v, z, dataclasses.asdict(params), generated)
    if params.has_target and 1.0 in expected:
        # Which of two candidates is nearer can hang on the last digit; then either is right.
        assume(_is_clear(p, v, params, generated))
    assert found == pytest.approx(expected, abs=1e-6)


def _is_clear(p: list[float], v: list[float], params: GuidanceParams, generated: int) -> bool:
    """Whether the candidate that a target picks does not change when values change in their last digits."""
    reference = guided(p, v, v, dataclasses.asdict(params), generated)
    shaken = [
        [value * (1 + (1e-12 if i == chosen else -1e-12)) for i, value in enumerate(v)] for chosen in range(len(v))
    ]
    return all(guided(p, each, each, dataclasses.asdict(params), generated) == reference for each in shaken)


def _is_steady(p: list[float], v: list[float], params: GuidanceParams) -> bool:
    """Whether the last digits decide nothing: no threshold is met exactly, and no target picks among equals."""
    width = max(v) - min(v)
    is_far = params.value_min is None or abs(mean(p, v) - params.value_min) > 1e-9
    return is_far and (width == 0 or width > 0.05) and (not params.has_target or len(set(p)) == len(p))


SCALES = st.sampled_from([-1e300, -1e30, -1.0, 0.5, 2.0, 1e30, 1e300])


@laws
@given(rows(), GUIDANCES | st.builds(GuidanceParams, mode=st.sampled_from(MODES), value_scale=SCALES), DTYPES)
def test_the_result_is_a_distribution_whose_support_never_grows_and_the_neutral_scale_is_the_identity(
    row: tuple[list[float], list[float], list[float]], params: GuidanceParams, dtype: Any
) -> None:
    p, v, z = row
    neutral = GuidanceParams(mode=params.mode, value_scale=NEUTRAL[params.mode])
    assert steer(p, v, neutral, z=z, dtype=dtype) == torch.tensor(p, dtype=dtype).tolist()
    p = [0.0, *p]  # an absent candidate, with the most tempting value of all
    found = steer(p, [1.0, *v], params, z=[100.0, *z], dtype=dtype)
    assert all(math.isfinite(each) and each >= 0 for each in found)
    assert math.fsum(found) == pytest.approx(1, abs=1e-5)
    assert found[0] == 0


@laws
@given(rows(), st.sampled_from(MODES), st.floats(0.01, 20), st.floats(0.01, 20))
def test_the_expected_value_rises_with_the_scale_in_every_mode(
    row: tuple[list[float], list[float], list[float]], mode: str, one: float, other: float
) -> None:
    p, v, z = row
    low, high = sorted((one, other))
    less, more = (mean(steer(p, v, GuidanceParams(mode=mode, value_scale=s), z=z), v) for s in (low, high))
    # Aims are kept a millionth of the range away from its ends, also where E lies closer to one.
    assert less <= more + 1e-6 * (max(v) - min(v)) + 2e-8


def test_aims_are_reached_where_probabilities_span_the_whole_range_of_float64() -> None:
    p, values = [1 - 1e-300 - 1e-100, 1e-100, 1e-300], ([0.1, 0.10000001, 0.9], [0.9, 0.5, 0.1], [0.5, 0.9, 0.1])
    for mode, scale, v in itertools.product(EXPECTATION_MODES, (0.01, 0.5, 1.5, 50.0), values):
        params = GuidanceParams(mode=mode, value_scale=scale)
        expected, found = guided(p, v, v, dataclasses.asdict(params)), steer(p, v, params)
        assert found == pytest.approx(expected, abs=1e-6), params
        assert mean(found, v) == pytest.approx(mean(expected, v), abs=1e-9), params


def test_one_candidate_stays_and_equal_values_change_nothing() -> None:
    for mode, dtype in itertools.product(MODES, (torch.float32, torch.float64)):
        params = GuidanceParams(mode=mode, value_scale=-7.0)
        assert steer([1.0], [0.3], params, dtype=dtype) == [1.0]
        assert steer([0.0, 1.0, 0.0], [0.1, 0.3, 0.9], params, dtype=dtype) == [0.0, 1.0, 0.0]
        assert steer([0.75, 0.25], [0.3, 0.3], params, dtype=dtype) == pytest.approx([0.75, 0.25], abs=1e-7)


def test_a_hard_target_picks_one_candidate_and_the_most_probable_of_equals() -> None:
    p, v = [0.1, 0.2, 0.3, 0.4], [0.7, 0.2, 0.7, 0.2]
    wanted = {"ge": [0, 0, 1, 0], "le": [0, 0, 0, 1], "eq": [0, 0, 1, 0]}
    for constraint, expected in wanted.items():
        assert steer(p, v, GuidanceParams(target_value=0.6, value_constraint=constraint)) == expected
    assert steer(p, v, GuidanceParams(target_value=0.0, value_constraint="ge")) == [0, 0, 0, 1], (
        "the budget is spent"
    )
    for target, expected in ((0.1, [0, 0, 0, 1]), (0.7, [0, 0, 1, 0]), (0.95, [0, 0, 1, 0])):
        assert steer(p, v, GuidanceParams(target_value=target, value_constraint="eq_soft")) == expected


def test_a_target_length_is_met_in_length_and_in_total_shrinks_with_what_is_generated() -> None:
    v = [value_of_length(length, 0.997) for length in (900.0, 1500.0)]
    target = value_of_length(1190.0, 0.997)
    assert abs(v[1] - target) < abs(v[0] - target), "in value the longer one is nearer"
    assert steer([0.5, 0.5], v, GuidanceParams(target_value=target)) == [1, 0]
    v = [value_of_length(length, 0.997) for length in (0.0, 40.0, 100.0)]
    for generated, expected in ((0, [0, 0, 1]), (65, [0, 1, 0]), (100, [1, 0, 0]), (5000, [1, 0, 0])):
        params = GuidanceParams(target_length=100, target_length_mode="total")
        assert steer([0.3, 0.3, 0.4], v, params, generated=generated) == expected
    assert target_value(GuidanceParams(target_value=0.25, target_length=9000), 0) == 0.25


def test_logarithms_keep_apart_what_underflows_as_a_probability() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float32)
    values = torch.tensor([[0.0, 0.5, 1.0]], dtype=torch.float32)
    batch = mode_batch([GuidanceParams(value_scale=-1000.0)], "cpu", [0])
    logs = log_tilt(probs, values, values, probs > 0, batch)[0][0].tolist()
    assert logs == pytest.approx([0.0, -500 - math.log(2), -1000 - math.log(2)], rel=1e-6)
    assert tilt(probs, values, values, probs > 0, batch)[0].tolist() == [1.0, 0.0, 0.0]


def test_lengths_have_their_known_values() -> None:
    known = {
        0.997: {1: 0.003, 10: 0.02959822, 60: 0.16495573, 100: 0.25951574, 300: 0.59397994, 1000: 0.95043692},
        0.9998: {1: 0.0002, 10: 0.0019982, 60: 0.01192947, 100: 0.01980329, 300: 0.05824112, 1000: 0.18128562},
    }
    for gamma, values in known.items():
        assert {length: value_of_length(length, gamma) for length in values} == pytest.approx(values, abs=1e-8)
    one = torch.ones(1, dtype=torch.float64)
    assert length_of_value(one, 0.997 * one).tolist() == [math.inf]
    assert value_of_length(math.inf, 0.997) == 1


def select(logits: list[float], *rows: dict[str, Any], dtype: Any = torch.float64, **options: Any) -> Candidates:
    """Candidates of the same logits with the limits of each row."""
    usual = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
    limits = torch.tensor([limit_numbers(**{**usual, **row}) for row in rows], dtype=torch.float64)
    max_candidates = options.pop("max_candidates", len(logits))
    return select_candidates(torch.tensor([logits] * len(rows), dtype=dtype), limits, max_candidates, **options)


def of_row(selected: Candidates, row: int = 0) -> dict[int, float]:
    """Candidates of one row by id."""
    probs, mask = selected.probs[row].tolist(), selected.mask[row].tolist()
    columns = zip(selected.ids[row].tolist(), probs, mask, strict=True)
    return {token: prob for token, prob, is_there in columns if is_there}


def logs(probs: list[float]) -> list[float]:
    return [math.log(prob) if prob else -math.inf for prob in probs]


KNOWN_SETS = [
    ([0.4, 0.25, 0.2, 0.1, 0.05, 0, 0, 0], {"top_k": 5, "top_p": 0.75}, [0, 1, 2]),
    ([0.35, 0.25, 0.2, 0.11, 0.09, 0, 0, 0], {"top_k": 5, "top_p": 0.8}, [0, 1, 2, 3]),
    ([0.9, 0.08, 0.0089, 0.0011], {"top_k": 4, "min_p": 0.01}, [0, 1]),
    ([0.995, 0.004, 0.001], {"top_k": 5, "min_p": 0.01}, [0]),
]
"""Probabilities, limits, candidates."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_known_sets_of_candidates_are_selected(dtype: Any) -> None:
    for probs, filters, expected in KNOWN_SETS:
        selected = select(logs(probs), filters, dtype=dtype)
        total = sum(probs[token] for token in expected)
        assert of_row(selected) == pytest.approx({token: probs[token] / total for token in expected}, abs=1e-6)
        assert selected.counts.tolist() == [len(expected) if len(expected) > 1 else 0]


@laws
@given(
    st.lists(st.floats(-8, 8), min_size=1, max_size=12, unique_by=lambda x: round(x, 3)),
    st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    st.integers(-1, 12),
    st.floats(0.05, 1),
    st.floats(0, 1),
)
def test_candidates_agree_with_the_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    filters, probs = {"top_k": top_k, "top_p": top_p, "min_p": min_p}, softmax(logits, temperature)
    selected = of_row(select(logits, {"temperature": temperature, **filters}))
    assert selected == pytest.approx(reference(probs, **filters), abs=1e-6) or _at_a_bound(probs, top_p, min_p)


def _at_a_bound(probs: list[float], top_p: float, min_p: float) -> bool:
    """Whether some token lies so near to a bound that the last digit decides; the parameters are float32."""
    mass = 0.0
    for prob in sorted(probs, reverse=True):
        if abs(mass - top_p) < 1e-6 or abs(prob - min_p * max(probs)) < 1e-6 * max(probs):
            return True
        mass += prob
    return False


def test_each_row_has_filters_of_its_own() -> None:
    filters = ({"top_k": 2}, {"top_p": 0.75}, {"min_p": 0.3}, {"temperature": 0.01})
    selected = select(logs([0.4, 0.3, 0.2, 0.1]), *filters)
    assert [sorted(of_row(selected, row)) for row in range(4)] == [[0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]
    assert of_row(selected, 3)[0] == pytest.approx(1, abs=1e-9)


@laws
@given(
    st.lists(st.sampled_from([-3e38, -1e30, -5.0, 0.0, 5.0, 1e30, 3e38]), min_size=1, max_size=6),
    st.sampled_from([1e-30, 0.1, 1.0, 100.0]),
    st.integers(-1, 6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_finite_logits_of_any_size_give_candidates(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, dtype: Any
) -> None:
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    selected = select(logits, filters, dtype=dtype)
    probs, kept = selected.probs[0].tolist(), selected.mask.sum().item()
    assert math.fsum(probs) == pytest.approx(1, abs=1e-6)
    assert [prob > 0 for prob in probs] == selected.mask[0].tolist()
    assert 1 <= kept <= (top_k if top_k > 0 else len(logits))
    assert selected.counts.tolist() == [kept if kept > 1 else 0]


def test_forbidden_tokens_are_no_candidates_the_likeliest_stays_and_equal_ones_stay_together() -> None:
    for logits, filters, kept in (
        ([-math.inf, 1.0, -math.inf, 0.5], {"top_k": 4}, [1, 3]),
        (logs([0.4, 0.35, 0.25]), {"top_p": 0.0}, [0]),
        (logs([0.4, 0.35, 0.25]), {"min_p": 1.0}, [0]),
        ([2.0, 2.0, 2.0, -1.0], {"min_p": 1.0}, [0, 1, 2]),
    ):
        selected = select(logits, filters)
        assert sorted(of_row(selected)) == kept, filters
        assert sorted(selected.ids[0].tolist()) == list(range(len(logits))), "absent columns hold valid ids, once"


def test_a_row_of_little_entropy_among_its_candidates_or_that_is_not_due_is_filtered_and_not_guided() -> None:
    for threshold, count in ((math.log(4) - 0.01, 4), (math.log(4) + 0.01, 0)):
        assert select([0.0] * 100, {"top_k": 4, "threshold": threshold}).counts.tolist() == [count]
    selected = select([1.0, 0.5, 0.0], {"top_k": 2, "is_due": False})
    assert (selected.counts.tolist(), sorted(of_row(selected))) == ([0], [0, 1])
