"""The rule by which prompts are counted, what simulated answers say, and how long they are."""

import json
import statistics

import pytest
from hypothesis import given, strategies as st
from support.datasets import GSM8K
from support.servers.simulator import NEUTRAL, prompt_of, question_request, request_of

from benchctl.guided.params import GuidanceParams
from benchctl.records.record import Message
from benchctl.sim.answers import (
    CLOSING_TOKEN_ID,
    FIRST_TOKEN_ID,
    guided_length_ratio,
    natural_length,
    natural_quantiles,
    plan_answers,
)
from benchctl.sim.requests import Request, SamplingParams
from benchctl.workload.tokenizers import _pieces, count_chat_tokens, count_tokens, tokenize


def natural_request(**fields: object) -> Request:
    return request_of("r", **{"ignore_eos": False, "max_tokens": 6000, **fields})


def test_an_answer_is_forced_to_its_length_ends_by_itself_or_is_cut_and_guidance_shortens_it() -> None:
    forced, whole, cut, short = (
        plan_answers(request)[0]
        for request in (
            request_of("r", max_tokens=77),
            natural_request(),
            natural_request(max_tokens=10),
            natural_request(guidance=GuidanceParams(mode="centered_exp", value_scale=-100.0)),
        )
    )
    assert (forced.num_tokens, forced.finish_reason, len(forced.text().split())) == (77, "length", 77)
    assert whole.finish_reason == "stop"
    assert 80 <= whole.num_tokens <= 1195
    assert (cut.num_tokens, cut.finish_reason) == (10, "length")
    assert whole.text().startswith(cut.text())
    assert short.num_tokens == round(whole.num_tokens * 278.905 / 353.2875)


def test_greedy_answers_ignore_the_seed_and_choices_say_the_same_for_different_lengths() -> None:
    greedy = SamplingParams(temperature=0.0)
    answers = [plan_answers(natural_request(seed=seed, sampling=greedy, n=4)) for seed in (1, 2)]
    assert answers[0][0] == answers[1][0]
    assert len({answer.num_tokens for answer in answers[0]}) == 4
    assert len({answer.token_text(0) + answer.token_text(1) for answer in answers[0]}) == 1


def test_an_answer_that_was_asked_for_a_box_ends_with_one() -> None:
    answer = plan_answers(question_request(1, "What is 2 + 2?", n=1, seed=5))[0]
    assert answer.text().rsplit("\n", 1)[1].startswith("\\boxed{")
    assert answer.token_id(answer.num_tokens - 1) == CLOSING_TOKEN_ID
    assert all(answer.token_id(i) >= FIRST_TOKEN_ID for i in range(answer.num_tokens - 1))


def test_answers_depend_on_seed_prompt_and_choice() -> None:
    def text(*, seed: int = 1, name: str = "p", choice: int = 0) -> str:
        return plan_answers(natural_request(seed=seed, prompt=prompt_of(20, name), n=2))[choice].text()

    assert text() == text()
    assert len({text(), text(seed=2), text(name="q"), text(choice=1)}) == 4


def test_natural_lengths_rise_with_the_quantile_average_297_tokens_and_samples_are_spread_over_them() -> None:
    lengths = [natural_length((i + 0.5) / 10_000) for i in range(10_000)]
    assert lengths == sorted(lengths)
    assert 80 <= natural_length(0.0) <= natural_length(1.0) <= 1195
    assert statistics.fmean(lengths) == pytest.approx(237_675 / 800, rel=0.002)
    quantiles = natural_quantiles(seed=3, prompt_digest="d", n=16)
    assert sorted(int(q * 16) for q in quantiles) == list(range(16))


def test_centered_exp_changes_lengths_as_published_a_larger_scale_never_shortens_and_other_modes_change_nothing():
    def ratio(scale: float) -> float:
        return guided_length_ratio(GuidanceParams(mode="centered_exp", value_scale=scale))

    shortest, longest = 278.905 / 353.2875, 353.2875 / 278.905
    published = {0.0: 1.0, -3.0: 351.300625 / 353.2875, -10.0: 343.32375 / 353.2875, -100.0: shortest}
    published |= {-1000.0: shortest, 100.0: longest}
    assert {scale: ratio(scale) for scale in published} == pytest.approx(published)
    ratios = [ratio(scale) for scale in range(-200, 201)]
    assert ratios == sorted(ratios)
    for guidance in (None, NEUTRAL, GuidanceParams(mode="mul", value_scale=0.5)):
        assert guided_length_ratio(guidance) == 1.0


@given(st.text() | st.text(" \n\ta5.'s猫"))
def test_the_pieces_of_a_text_are_the_text_and_those_of_its_words_as_far_as_single_blanks_part_them(text: str):
    assert "".join(tokenize(text)) == text
    assert tokenize(text) == list(_pieces(text))


def test_words_digits_and_punctuation_are_counted_and_five_tokens_around_each_message() -> None:
    counts = {
        "": 0, "Hello": 1, "Hello world": 2, "It's": 2, "123": 3, "incomprehensibilities": 3,
        "costs 12": 4,  # the blank before a digit is a token
        " incomprehensibilities": 3, "a, b.\n\n": 4, "   ": 1,
    }  # fmt: skip
    assert {text: count_tokens(text) for text in counts} == counts
    assert count_chat_tokens([]) == 3
    assert count_chat_tokens([Message(role="user", content="Hello world")]) == 3 + 5 + 2


@pytest.mark.parametrize(
    ("text", "fewest", "most"),
    [  # counts of Llama 3.1, Qwen3, Gemma 3, DeepSeek-V3, GPT-4o and Mistral-Nemo lie between
        ("人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。", 27, 39),
        (
            (
                "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は、理性と良心とを"
                "授けられており、互いに同胞の精神をもって行動しなければならない。"
            ),
            46,
            72,
        ),
        (
            (
                "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 "
                "이성과 양심을 부여받았으며 서로 형제애의 정신으로 행동하여야 한다."
            ),
            46,
            57,
        ),
        (
            (
                "All human beings are born free and equal in dignity and rights. They are endowed with reason and "
                "conscience and should act towards one another in a spirit of brotherhood."
            ),
            32,
            34,
        ),
    ],
)
def test_the_estimate_is_among_the_counts_of_real_tokenizers(text: str, fewest: int, most: int) -> None:
    assert fewest <= count_tokens(text) <= most


@pytest.mark.skipif(not GSM8K.exists(), reason="needs ../shared/data/gsm8k/test.jsonl")
def test_gsm8k_prompts_average_about_104_tokens() -> None:
    system = Message(role="system", content="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
    instruction = "Please reason step by step, and put your final answer within \\boxed{}.\n\n"
    questions = [json.loads(line)["question"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    counts = [count_chat_tokens([system, Message(role="user", content=instruction + q)]) for q in questions]
    assert sum(counts) / len(counts) == pytest.approx(104.5, abs=0.5)
    assert sum(counts[:50]) == pytest.approx(5200, rel=0.02)
