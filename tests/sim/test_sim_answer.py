"""What simulated answers say and how long they are."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers.simulator import NEUTRAL, prompt_of, question_request, request_of

from benchctl.guided.params import GuidanceParams
from benchctl.sim.answers import (
    CLOSING_TOKEN_ID,
    FIRST_TOKEN_ID,
    Answer,
    guided_length_ratio,
    natural_length,
    natural_quantiles,
    plan_answers,
)
from benchctl.sim.requests import Request, SamplingParams


def natural_request(**fields: object) -> Request:
    return request_of("r", **{"ignore_eos": False, "max_tokens": 6000, **fields})


def plan_answer(request: Request, choice: int) -> Answer:
    return plan_answers(request)[choice]


def test_a_forced_answer_has_exactly_max_tokens() -> None:
    answer = plan_answer(request_of("r", max_tokens=77), 0)
    assert (answer.num_tokens, answer.finish_reason) == (77, "length")
    assert len(answer.text().split()) == 77


def test_a_natural_answer_ends_by_itself_or_is_cut() -> None:
    whole = plan_answer(natural_request(), 0)
    assert whole.finish_reason == "stop"
    assert 80 <= whole.num_tokens <= 1195
    cut = plan_answer(natural_request(max_tokens=10), 0)
    assert (cut.num_tokens, cut.finish_reason) == (10, "length")
    assert whole.text().startswith(cut.text())


def test_an_answer_that_was_asked_for_a_box_ends_with_one() -> None:
    request = question_request(1, "What is 2 + 2?", n=1, seed=5)
    answer = plan_answer(request, 0)
    assert answer.text().rsplit("\n", 1)[1].startswith("\\boxed{")
    assert answer.token_id(answer.num_tokens - 1) == CLOSING_TOKEN_ID
    assert all(answer.token_id(i) >= FIRST_TOKEN_ID for i in range(answer.num_tokens - 1))


def test_answers_depend_on_seed_prompt_and_choice() -> None:
    def text(*, seed: int = 1, name: str = "p", choice: int = 0) -> str:
        return plan_answer(natural_request(seed=seed, prompt=prompt_of(20, name), n=2), choice).text()

    assert text() == text()
    assert len({text(), text(seed=2), text(name="q"), text(choice=1)}) == 4


def test_a_greedy_answer_ignores_the_seed() -> None:
    greedy = SamplingParams(temperature=0.0)
    answers = [plan_answer(natural_request(seed=seed, sampling=greedy), 0) for seed in (1, 2)]
    assert answers[0] == answers[1]


def test_greedy_choices_say_the_same_for_different_lengths() -> None:
    answers = plan_answers(natural_request(sampling=SamplingParams(temperature=0.0), n=4))
    assert len({answer.num_tokens for answer in answers}) == 4
    assert len({answer.token_text(0) + answer.token_text(1) for answer in answers}) == 1


@given(st.floats(0, 1), st.floats(0, 1))
def test_lengths_rise_with_the_quantile(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 80 <= natural_length(low) <= natural_length(high) <= 1195


def test_the_samples_of_a_request_are_spread_over_the_distribution() -> None:
    quantiles = natural_quantiles(seed=3, prompt_digest="d", n=16)
    assert sorted(int(q * 16) for q in quantiles) == list(range(16))


def test_natural_lengths_average_297_tokens() -> None:
    lengths = [natural_length((i + 0.5) / 10_000) for i in range(10_000)]
    assert statistics.fmean(lengths) == pytest.approx(237_675 / 800, rel=0.002)


@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        (0.0, 1.0),
        (-100.0, 278.905 / 353.2875),
        (-10.0, 343.32375 / 353.2875),
        (-1000.0, 278.905 / 353.2875),
        (-3.0, 351.300625 / 353.2875),
        (100.0, 353.2875 / 278.905),
    ],
)
def test_centered_exp_changes_lengths_as_published(scale: float, ratio: float) -> None:
    assert guided_length_ratio(GuidanceParams(mode="centered_exp", value_scale=scale)) == pytest.approx(ratio)


@given(st.floats(-200, 200), st.floats(-200, 200))
def test_a_larger_scale_never_shortens(a: float, b: float) -> None:
    low, high = sorted((a, b))
    shorter, longer = (guided_length_ratio(GuidanceParams(mode="centered_exp", value_scale=s)) for s in (low, high))
    assert shorter <= longer + 1e-12


@pytest.mark.parametrize("guidance", [None, NEUTRAL, GuidanceParams(mode="mul", value_scale=0.5)])
def test_other_guidance_leaves_lengths_alone(guidance: GuidanceParams | None) -> None:
    assert guided_length_ratio(guidance) == 1.0
    assert (
        plan_answer(natural_request(guidance=guidance), 0).num_tokens
        == plan_answer(natural_request(), 0).num_tokens
    )


def test_a_shortened_answer_is_shorter_by_the_ratio() -> None:
    short = GuidanceParams(mode="centered_exp", value_scale=-100.0)
    plain = plan_answer(natural_request(), 0).num_tokens
    assert plan_answer(natural_request(guidance=short), 0).num_tokens == round(plain * 278.905 / 353.2875)
