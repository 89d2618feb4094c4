"""What a request may ask of a value model, and how it is told what it may not."""

import contextlib
import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.errors import UsageError
from benchctl.guided.params import (
    CONSTRAINTS,
    KNOWN_KEYS,
    MODES,
    PARAMETERS,
    GuidanceError,
    GuidanceParams,
    check_top_k,
    parse_params,
)
from benchctl.profile.model import Guidance


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("value_scale", -2.5), ("scale", 0), ("mode", "linear"), ("value_mode", "exp"), ("target_value", 0.5),
        ("target_length", 100), ("value_constraint", "ge"), ("constraint", "le"), ("cmp", "=="), ("op", "~="),
    ],
)  # fmt: skip
def test_each_of_the_ten_activating_keys_asks_for_guidance(key: str, value: object) -> None:
    assert parse_params({key: value}) is not None


@pytest.mark.parametrize(
    "params",
    [{}, {"gamma": 0.9}, {"value_min": 0.1, "entropy_threshold": 1.0}, {"length_mode": "total", "stride": 2}],
)
def test_keys_that_only_refine_guidance_do_not_ask_for_it(params: dict[str, Any]) -> None:
    assert parse_params(params) is None


def test_a_request_without_a_mode_gets_mul_at_scale_one() -> None:
    assert parse_params({"scale": 1}) == GuidanceParams(mode="mul", value_scale=1.0, gamma=0.997)
    assert parse_params({"op": ">="}) == GuidanceParams(mode="mul", value_scale=1.0, value_constraint="ge")


def test_of_two_names_of_one_field_the_documented_one_counts() -> None:
    both = parse_params(
        {"mode": "linear", "value_mode": "exp", "length_gamma": 0.9, "gamma": 0.8, "value_scale": 2, "scale": 3}
    )
    assert both == GuidanceParams(mode="linear", gamma=0.9, value_scale=2.0)


def test_every_field_can_be_asked_for() -> None:
    assert parse_params(
        {
            "mode": "value_bias", "value_scale": -1, "gamma": 0.9998, "value_min": 0.2, "entropy_threshold": 0.5,
            "target_value": 0.25, "target_length": 12, "target_length_mode": "remaining", "cmp": "<=", "stride": 3,
            "skip_noop": False,
        }
    ) == GuidanceParams(
        mode="value_bias", value_scale=-1.0, gamma=0.9998, value_min=0.2, value_entropy_threshold=0.5,
        target_value=0.25, target_length=12.0, target_length_mode="remaining", value_constraint="le", stride=3,
        skip_noop=False,
    )  # fmt: skip


def test_a_budget_is_a_total_and_signs_are_constraints() -> None:
    assert parse_params({"target_length": 5, "length_mode": "budget"}).target_length_mode == "total"
    for sign, name in {"==": "eq", "=": "eq", ">=": "ge", "<=": "le", "~=": "eq_soft", "~": "eq_soft"}.items():
        assert parse_params({"target_value": 0.5, "op": sign}).value_constraint == name


INVALID = [
    ("value_scale", math.inf), ("scale", math.nan), ("scale", "2"), ("scale", True), ("scale", None),
    ("scale", 10**400), ("mode", "multiply"), ("value_mode", 3), ("mode", ["mul"]), ("gamma", 0), ("gamma", 1),
    ("length_gamma", -0.5), ("value_min", math.inf), ("entropy_threshold", "low"),
    ("value_entropy_threshold", math.nan), ("target_value", -0.01), ("target_value", 1.01),
    ("target_length", -1), ("target_length", math.inf), ("target_length_mode", "rest"), ("length_mode", 1),
    ("value_constraint", "gt"), ("constraint", ">"), ("cmp", None), ("op", "!="), ("stride", 0), ("stride", 1.5),
    ("stride", -2), ("skip_noop", "yes"), ("skip_noop", 2), ("skip_noop", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), INVALID)
def test_an_invalid_value_is_refused_by_key_value_and_remedy(key: str, value: object) -> None:
    with pytest.raises(GuidanceError) as caught:
        parse_params({"mode": "mul", key: value} if key != "mode" else {key: value})
    message = str(caught.value)
    assert f"guidance: {key} is {value!r}; it " in message
    assert "must" in message


def test_an_invalid_value_under_a_name_that_does_not_count_is_refused_as_well() -> None:
    with pytest.raises(GuidanceError, match="value_mode is 'multiply'"):
        parse_params({"mode": "mul", "value_mode": "multiply"})


def test_an_invalid_value_is_refused_even_where_nothing_activates_guidance() -> None:
    with pytest.raises(GuidanceError, match="gamma is 2"):
        parse_params({"gamma": 2})


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(GuidanceError, match="unknown key 'value_scal'; did you mean 'value_scale'"):
        parse_params({"value_scal": 1})
    with pytest.raises(GuidanceError, match="known keys are cmp, constraint, entropy_threshold"):
        parse_params({"zzz": 1})


@pytest.mark.parametrize("key", ["token_temperature_scale", "boosted_token_ids", "token_temp_divisor"])
def test_a_temperature_of_single_tokens_is_refused_rather_than_ignored(key: str) -> None:
    with pytest.raises(GuidanceError, match="logit_bias"):
        parse_params({"mode": "mul", key: {}})


def test_an_error_of_guidance_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(GuidanceError, UsageError)
    assert issubclass(GuidanceError, ValueError)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(KNOWN_KEYS)), st.integers() | st.floats() | st.text() | st.none()))
def test_whatever_is_asked_gives_parameters_or_one_kind_of_error(params: dict[str, Any]) -> None:
    with contextlib.suppress(GuidanceError):
        found = parse_params(params)
        assert found is None or (
            found.mode in MODES and found.value_constraint in CONSTRAINTS and 0 < found.gamma < 1
        )


def test_parameters_made_by_hand_are_checked_as_well() -> None:
    with pytest.raises(GuidanceError, match="gamma is 1"):
        GuidanceParams(gamma=1.0)
    assert GuidanceParams(value_constraint=">=").value_constraint == "ge"


@pytest.mark.parametrize(
    ("mode", "neutral", "active"),
    [
        ("centered_exp", (0.0, 1e-12, -1e-12), (1.0, 1e-11, -100.0)),
        ("value_bias", (0.0, 1e-12), (1.0, -0.001)),
        ("mul", (1.0, 0.0, -3.0, 1 + 1e-13), (0.5, 1.001)),
        ("linear", (1.0,), (0.0, -1.0, 0.999)),
        ("exp", (1.0,), (0.0, 2.0)),
        ("length_mul", (1.0,), (0.0, 1.5)),
    ],
)
def test_guidance_is_a_no_op_exactly_at_the_neutral_scales_of_its_mode(
    mode: str, neutral: tuple[float, ...], active: tuple[float, ...]
) -> None:
    assert all(GuidanceParams(mode=mode, value_scale=scale).is_neutral for scale in neutral)
    assert not any(GuidanceParams(mode=mode, value_scale=scale).is_neutral for scale in active)


def test_a_target_is_never_a_no_op_and_a_constraint_without_one_constrains_nothing() -> None:
    assert not GuidanceParams(mode="mul", value_scale=1.0, target_value=0.0).is_neutral
    assert not GuidanceParams(mode="mul", value_scale=1.0, target_length=10).is_neutral
    assert parse_params({"constraint": "eq"}).is_neutral


def test_more_candidates_than_a_value_model_scores_are_refused_at_the_door() -> None:
    params = GuidanceParams()
    for top_k in (1, 2, 64):
        check_top_k(params, top_k, 64)
    for top_k, meaning in ((-1, "every token"), (0, "every token"), (65, "65 candidates")):
        with pytest.raises(
            GuidanceError, match=rf"top_k is {top_k} with mode 'centered_exp': {meaning}.* 64 at most"
        ):
            check_top_k(params, top_k, 64)


def test_profiles_requests_and_the_plugin_know_the_same_parameters() -> None:
    names = set(PARAMETERS)
    assert names == {each.name for each in dataclasses.fields(GuidanceParams) if each.init}
    assert {name for name in names if PARAMETERS[name].is_in_profiles} == set(Guidance.model_fields)
    assert all(name in parameter.keys for name, parameter in PARAMETERS.items())
    assert len(KNOWN_KEYS) == sum(len(parameter.keys) for parameter in PARAMETERS.values()), "a key has one meaning"


def test_what_a_profile_asks_of_guidance_is_understood_as_it_is_written() -> None:
    guidance = Guidance(mode="exp", value_scale=2.0, value_entropy_threshold=0.5, target_length=9.0)
    params = parse_params(guidance.model_dump(exclude_none=True))
    assert params is not None
    assert {name: getattr(params, name) for name in guidance.model_dump(exclude_none=True)} == guidance.model_dump(
        exclude_none=True
    )
