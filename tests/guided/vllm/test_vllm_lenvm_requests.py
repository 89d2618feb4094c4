"""What a request to a guided vLLM server asks for, and where its filters are applied."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from support.guided.tensors import torch  # noqa: F401 - skips these tests where there is none

from benchctl.guided.params import GuidanceError
from benchctl.guided.vllm.requests import admit, asks_for_guidance, guided_request
from benchctl.guided.vllm.settings import VllmSettings, settings_of

TILT = {"lenvm_mode": "centered_exp", "lenvm_value_scale": -3.0}


@dataclass
class Asked:
    """The parameters of vLLM that matter here, with its defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    extra_args: dict[str, Any] | None = field(default_factory=dict)

    @property
    def filters(self) -> tuple[int, float, float]:
        return self.top_k, self.top_p, self.min_p


def test_filters_of_a_guided_request_are_moved_to_where_they_are_applied_once():
    asked = Asked(top_k=5, top_p=0.9, min_p=0.01, extra_args=TILT | {"session": "a"})
    admit(asked, 64)
    once = (asked.filters, dict(asked.extra_args))
    admit(asked, 64)
    assert (asked.filters, asked.extra_args) == once
    assert (asked.filters, asked.extra_args["session"]) == ((0, 1.0, 0.0), "a")
    request = guided_request(asked)
    assert (request.top_k, request.top_p, request.min_p) == (5, 0.9, 0.01)
    assert (request.params.mode, request.params.value_scale) == ("centered_exp", -3.0)
    neutral = Asked(top_k=5, extra_args={"lenvm_value_scale": 0.0, "lenvm_mode": "exp", "lenvm_skip_noop": 0})
    admit(neutral, 64)
    assert guided_request(neutral).params.skip_noop is False


def test_filters_may_be_sent_with_the_prefix_as_well_and_go_back_where_nothing_is_guided():
    for temperature in (1.0, 0.0):
        asked = Asked(temperature=temperature, extra_args=TILT | {"lenvm_top_k": 7})
        admit(asked, 64)
        request = guided_request(asked)
        assert (request and request.top_k, asked.top_k) == ((7, 0) if temperature else (None, 7))


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (TILT, {"temperature": 0.0, "top_k": 5}),
        (TILT, {"top_k": 1}),
        ({"lenvm_value_scale": 0.0, "lenvm_mode": "centered_exp"}, {"top_k": 5, "top_p": 0.5}),
        ({"lenvm_gamma": 0.99}, {"top_k": 5}),
        ({}, {"top_k": 5, "min_p": 0.1}),
        ({"mode": "nonsense", "value_scale": "of another plugin"}, {"top_p": 0.5}),
    ],
    ids=["greedy", "one-candidate", "neutral", "not-activated", "none", "keys-of-another"],
)
def test_a_request_that_guidance_never_touches_keeps_the_filters_of_the_server(extra, told):
    asked = Asked(**told, extra_args=dict(extra))
    admit(asked, 64)
    assert asked == Asked(**told, extra_args=dict(extra))
    assert guided_request(asked) is None


@pytest.mark.parametrize(
    ("told", "extra", "said"),
    [
        ({"top_k": 5}, {"lenvm_value_scale": "strong"}, "value_scale is 'strong'"),
        ({"top_k": 5}, {"lenvm_scal": 1.0}, "did you mean"),
        ({"top_k": 5}, {"lenvm_value_scale": float("nan")}, "finite"),
        ({}, TILT, "top_k is 0"),
        ({"top_k": -1}, TILT, "top_k is -1"),
        ({"top_k": 65}, TILT, "64 at most"),
        ({"top_k": 5, "temperature": 0.0}, {"lenvm_mode": "none"}, "mode is 'none'"),
        ({"top_k": 5, "top_p": 0.5}, TILT | {"lenvm_top_p": 0.9}, "one of the two"),
        ({"top_k": 5}, TILT | {"lenvm_min_p": 2}, "lenvm_min_p is 2"),
        ({}, TILT | {"lenvm_top_k": 2.5}, "whole number"),
        ({"top_k": 5}, TILT | {"lenvm_top_p": 0}, "lenvm_top_p is 0"),
    ],
)
def test_what_does_not_exist_is_refused_with_its_name(told, extra, said):
    asked = Asked(**told, extra_args=dict(extra))
    with pytest.raises(GuidanceError, match=said):
        admit(asked, 64)
    assert asked == Asked(**told, extra_args=dict(extra))


def test_only_keys_with_the_prefix_are_ours():
    for extra, is_ours in ((None, False), ({"value_scale": 1}, False), ({"lenvm_value_scale": 1}, True)):
        assert asks_for_guidance(Asked(extra_args=extra)) is is_ours


def test_a_server_is_told_its_settings_in_one_variable_and_refuses_what_does_not_exist():
    assert settings_of({}) == VllmSettings()
    told = settings_of({"BENCHCTL_LENVM_SETTINGS": '{"fused": false, "memory_bytes": 5}'})
    assert told == VllmSettings(fused=False, memory_bytes=5)
    for text in ("no json", "[]", '{"fuse": true}', '{"fused": 1}', '{"max_candidates": true}'):
        with pytest.raises(GuidanceError, match="BENCHCTL_LENVM_SETTINGS"):
            settings_of({"BENCHCTL_LENVM_SETTINGS": text})
