"""Prompts of a planned length: exact for any tokenizer, with shared beginnings kept."""

from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizer_kinds import TrainedTokenizer, byte_level, sentence_piece, unigram, word_piece

from benchctl.errors import ProfileError
from benchctl.workload.datasets.base import Prompt
from benchctl.workload.seeded import numbers_of_prompt
from benchctl.workload.tokenizers import Estimate
from benchctl.workload.written_texts import alphabet_of, counted_prompts, write_texts

KINDS = {
    "bytes": lambda: byte_level(259),
    "few-words": lambda: byte_level(512),
    "words": lambda: byte_level(9000),
    "bos": lambda: byte_level(1024, adds_bos=True),
    "bytes-bos": lambda: byte_level(300, adds_bos=True),
    "sentence-piece": lambda: sentence_piece(600),
    "sentence-piece-words": lambda: sentence_piece(6000),
    "word-piece": lambda: word_piece(3000),
    "unigram": lambda: unigram(800),
    "estimate": Estimate,
}


@cache
def kind(name):
    return KINDS[name]()


@given(
    kind_name=st.sampled_from(sorted(KINDS)),
    sizes=st.lists(st.integers(8, 700), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50)
def test_any_tokenizer_counts_exactly_the_planned_length(kind_name: str, sizes: list[int], seed: int) -> None:
    tokenizer = kind(kind_name)
    plans = [numbers_of_prompt(size, i, seed) for i, size in enumerate(sizes)]
    written = write_texts(plans, tokenizer.count_texts)
    texts = [written[plan] for plan in plans]
    assert [text.num_tokens for text in texts] == sizes
    assert tokenizer.count_texts([text.text for text in texts]) == tuple(sizes)
    assert write_texts(plans, tokenizer.count_texts) == written


@given(
    kind_name=st.sampled_from(sorted(KINDS)),
    beginning=st.lists(st.integers(0, 200_000), min_size=20, max_size=200),
    tails=st.lists(st.lists(st.integers(0, 200_000), min_size=20, max_size=50), min_size=2, max_size=4),
)
@settings(max_examples=30)
def test_plans_that_share_a_beginning_give_texts_and_tokens_that_share_it(
    kind_name: str, beginning: list[int], tails: list[list[int]]
) -> None:
    tokenizer = kind(kind_name)
    plans = [(*beginning, *tail) for tail in tails]
    texts = [write_texts(plans, tokenizer.count_texts)[plan].text for plan in plans]
    shared = alphabet_of(tokenizer.count_texts).text(beginning)
    assert all(text.startswith(shared) for text in texts)
    if isinstance(tokenizer, TrainedTokenizer):
        ids = [tokenizer.ids(text)[: len(beginning)] for text in texts]
        assert all(each == ids[0] for each in ids)


@given(kind_name=st.sampled_from(sorted(KINDS)), sizes=st.lists(st.integers(60, 300), min_size=1, max_size=4))
@settings(max_examples=20)
def test_a_planned_length_of_a_chat_includes_the_template(kind_name: str, sizes: list[int]) -> None:
    tokenizer = kind(kind_name)
    counted = counted_prompts([planned(size, i) for i, size in enumerate(sizes)], tokenizer, chat=True)
    assert [prompt.num_tokens for prompt in counted] == sizes
    assert all(prompt.text is None and [turn.role for turn in prompt.messages] == ["user"] for prompt in counted)
    assert tokenizer.count_chats([prompt.messages for prompt in counted]) == tuple(sizes)


def planned(size: int, index: int = 0) -> Prompt:
    return Prompt(prompt_id=f"p-{index}", source=f"p:{index}", token_numbers=numbers_of_prompt(size, index, seed=0))


@pytest.mark.parametrize("kind_name", sorted(set(KINDS) - {"estimate"}))
def test_few_calls_and_few_texts_are_counted_however_many_prompts(kind_name: str) -> None:
    tokenizer = KINDS[kind_name]()
    write_texts([numbers_of_prompt(100, i, seed=0) for i in range(500)], tokenizer.count_texts)
    assert len(tokenizer.calls) <= 12
    assert sum(tokenizer.calls) < 2500 + 2 * 500


def test_a_length_that_a_template_fills_by_itself_names_the_least() -> None:
    tokenizer = kind("words")
    (template,) = tokenizer.count_chats([[]])
    message = r"planned with 7 tokens, but the server adds (\d+) .*plan at least (\d+).*workload\.chat"
    with pytest.raises(ProfileError, match=message) as raised:
        counted_prompts([planned(7)], tokenizer, chat=True)
    least = int(str(raised.value).partition("at least ")[2].split(",")[0])
    assert counted_prompts([planned(least)], tokenizer, chat=True)[0].num_tokens == least > template


def test_a_length_that_cannot_be_had_is_recorded_as_it_is():
    def pairs(texts):
        """Counts pairs of words: no text has an odd length."""
        return tuple(2 * -(-len(text.split()) // 2) for text in texts)

    even = SimpleNamespace(source="even", count_texts=pairs, count_chats=None)
    (counted,) = counted_prompts([planned(21)], even, chat=False)
    assert counted.num_tokens in {20, 22}
    assert pairs([counted.text]) == (counted.num_tokens,)
