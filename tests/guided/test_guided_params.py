"""What a request may ask of a value model, and how it is told what it may not."""

import dataclasses
import math
import re

import pytest

from benchctl.guided.params import (
    KNOWN_KEYS,
    PARAMETERS,
    GuidanceError,
    GuidanceParams,
    parse_params,
)
from benchctl.profile.model import Guidance

ACTIVATING = {
    "value_scale": -2.5, "scale": 0, "mode": "linear", "value_mode": "exp", "target_value": 0.5,
    "target_length": 100, "value_constraint": "ge", "constraint": "le", "cmp": "==", "op": "~=",
}  # fmt: skip
REFINING = [{}, {"gamma": 0.9}, {"value_min": 0.1, "entropy_threshold": 1.0}, {"length_mode": "total", "stride": 2}]
SIGNS = {"==": "eq", "=": "eq", ">=": "ge", "<=": "le", "~=": "eq_soft", "~": "eq_soft"}


def test_each_of_the_ten_activating_keys_asks_for_guidance_and_others_only_refine_it() -> None:
    assert all(parse_params({key: value}) is not None for key, value in ACTIVATING.items())
    assert all(parse_params(params) is None for params in REFINING)
    assert parse_params({"scale": 1}) == GuidanceParams(mode="mul", value_scale=1.0, gamma=0.997)
    assert parse_params({"op": ">="}) == GuidanceParams(mode="mul", value_scale=1.0, value_constraint="ge")
    for sign, name in SIGNS.items():
        assert parse_params({"target_value": 0.5, "op": sign}).value_constraint == name
    assert parse_params({"target_length": 5, "length_mode": "budget"}).target_length_mode == "total"


def test_every_field_can_be_asked_for_and_of_two_names_of_one_the_documented_one_counts() -> None:
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
    names = {"mode": "linear", "value_mode": "exp", "length_gamma": 0.9, "gamma": 0.8, "value_scale": 2, "scale": 3}
    assert parse_params(names) == GuidanceParams(mode="linear", gamma=0.9, value_scale=2.0)
    # What a profile asks of guidance is understood as it is written.
    said = {"mode": "exp", "value_scale": 2.0, "value_entropy_threshold": 0.5, "target_length": 9.0, "gamma": 0.9}
    assert parse_params(Guidance(**said).model_dump(exclude_none=True)) == GuidanceParams(**said)


INVALID = [
    ("value_scale", math.inf), ("scale", math.nan), ("scale", "2"), ("scale", True), ("scale", None),
    ("scale", 10**400), ("mode", "multiply"), ("value_mode", 3), ("mode", ["mul"]), ("gamma", 0), ("gamma", 1),
    ("length_gamma", -0.5), ("value_min", math.inf), ("entropy_threshold", "low"),
    ("value_entropy_threshold", math.nan), ("target_value", -0.01), ("target_value", 1.01),
    ("target_length", -1), ("target_length", math.inf), ("target_length_mode", "rest"), ("length_mode", 1),
    ("value_constraint", "gt"), ("constraint", ">"), ("cmp", None), ("op", "!="), ("stride", 0), ("stride", 1.5),
    ("stride", -2), ("skip_noop", "yes"), ("skip_noop", 2), ("skip_noop", 1.0),
]  # fmt: skip


def test_an_invalid_value_is_refused_by_key_value_and_remedy() -> None:
    for key, value in INVALID:
        with pytest.raises(GuidanceError) as caught:
            parse_params({"mode": "mul", key: value} if key != "mode" else {key: value})
        assert re.search(re.escape(f"guidance: {key} is {value!r}; it ") + ".*must", str(caught.value))
    for params, message in (
        ({"mode": "mul", "value_mode": "multiply"}, "value_mode is 'multiply'"),  # under a name that does not count
        ({"gamma": 2}, "gamma is 2"),  # where nothing activates guidance
        ({"value_scal": 1}, "unknown key 'value_scal'; did you mean 'value_scale'"),
        ({"zzz": 1}, "known keys are cmp, constraint, entropy_threshold"),
        ({"mode": "mul", "token_temperature_scale": {}}, "logit_bias"),
        ({"mode": "mul", "boosted_token_ids": {}}, "logit_bias"),
        ({"mode": "mul", "token_temp_divisor": {}}, "logit_bias"),
    ):
        with pytest.raises(GuidanceError, match=message):
            parse_params(params)
    with pytest.raises(GuidanceError, match="gamma is 1"):
        GuidanceParams(gamma=1.0)
    assert GuidanceParams(value_constraint=">=").value_constraint == "ge"


def test_guidance_is_a_no_op_exactly_at_the_neutral_scales_of_its_mode_and_never_with_a_target() -> None:
    for mode, neutral, active in (
        ("centered_exp", (0.0, 1e-12, -1e-12), (1.0, 1e-11, -100.0)),
        ("value_bias", (0.0, 1e-12), (1.0, -0.001)),
        ("mul", (1.0, 0.0, -3.0, 1 + 1e-13), (0.5, 1.001)),
        ("linear", (1.0,), (0.0, -1.0, 0.999)),
        ("exp", (1.0,), (0.0, 2.0)),
        ("length_mul", (1.0,), (0.0, 1.5)),
    ):
        assert all(GuidanceParams(mode=mode, value_scale=scale).is_neutral for scale in neutral), mode
        assert not any(GuidanceParams(mode=mode, value_scale=scale).is_neutral for scale in active), mode
    for target in ({"target_value": 0.0}, {"target_length": 10}):
        assert not GuidanceParams(mode="mul", value_scale=1.0, **target).is_neutral
    assert parse_params({"constraint": "eq"}).is_neutral


def test_profiles_requests_and_the_plugin_know_the_same_parameters() -> None:
    names = set(PARAMETERS)
    assert names == {each.name for each in dataclasses.fields(GuidanceParams) if each.init}
    assert {name for name in names if PARAMETERS[name].is_in_profiles} == set(Guidance.model_fields)
    assert all(name in parameter.keys for name, parameter in PARAMETERS.items())
    assert len(KNOWN_KEYS) == sum(len(parameter.keys) for parameter in PARAMETERS.values()), "a key has one meaning"
