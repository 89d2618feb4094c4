"""The rule by which prompts are counted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.datasets import GSM8K

from benchctl.records.record import Message
from benchctl.workload.tokenizers import count_chat_tokens, count_tokens, tokenize


@given(st.text())
def test_the_pieces_of_a_text_are_the_text(text: str) -> None:
    assert "".join(tokenize(text)) == text
    assert count_tokens(text) == len(tokenize(text))


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
