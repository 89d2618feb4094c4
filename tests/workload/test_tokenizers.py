"""Tokenizers in files count as the servers that load them; prompts of a planned length are exact for any."""

import hashlib
import json
import re
import shutil
import sys
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from support.servers.real_engines import tiny_model
from support.tokenizer_kinds import TrainedTokenizer, byte_level, sentence_piece, unigram, word_piece

from benchctl.errors import ProfileError, UsageError
from benchctl.records.record import Message
from benchctl.workload import chat_template
from benchctl.workload.chat_template import ChatTemplate
from benchctl.workload.datasets.base import Prompt
from benchctl.workload.seeded import numbers_of_prompt
from benchctl.workload.tokenizers import Estimate, LocalTokenizer
from benchctl.workload.written_texts import alphabet_of, counted_prompts, write_texts

tokenizers = pytest.importorskip("tokenizers")
USER = (Message(role="user", content="What is 17 plus 25?"),)
CONVERSATION = (
    Message(role="system", content="Answer in one word."),
    *USER,
    Message(role="assistant", content="42"),
    Message(role="user", content="And 1 more?\n\n"),
)


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(name="copy")
def _copy(model, tmp_path) -> Path:
    """The tokenizer of a model without weights, to be altered."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(model / name, tmp_path)
    return tmp_path


def with_template(directory: Path, template: object, **tokens: object) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **tokens}))
    return directory


def with_bos(directory: Path) -> Path:
    """The tokenizer puts <|endoftext|> before every text, as those of Llama put their BOS."""
    document = json.loads((directory / "tokenizer.json").read_text())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(document))
    return directory


def test_a_chat_is_counted_as_its_template_writes_it_and_the_source_is_the_hash_of_the_file(model):
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    written = "<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(model).render(USER) == written
    assert LocalTokenizer(model).count_chats([USER]) == (len(tokenizer.encode(written).ids),)
    content = (model / "tokenizer.json").read_bytes()
    assert LocalTokenizer(model).source == f"tokenizer {hashlib.sha256(content).hexdigest()}"


def test_tokens_that_every_completion_is_given_count_once_and_not_in_chats(copy):
    texts = ["one two", "", "three"]
    plain, chat = LocalTokenizer(copy).count_texts(texts), LocalTokenizer(copy).count_chats([USER])
    with_bos(copy)
    assert LocalTokenizer(copy).count_texts(texts) == tuple(count + 1 for count in plain)
    assert LocalTokenizer(copy).count_chats([USER]) == chat


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_counts_whole_prompts(copy):
    texts = ["word " * 100, "a"]
    whole = LocalTokenizer(copy).count_texts(texts)
    saved = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    saved.enable_truncation(16)
    saved.enable_padding(length=64)
    saved.save(str(copy / "tokenizer.json"))
    assert LocalTokenizer(copy).count_texts(texts) == whole


@settings(max_examples=6)  # each chat alone takes a process of its own
@given(texts=st.lists(st.text(max_size=30), max_size=4), repeats=st.sampled_from([1, 99]))
def test_a_text_has_the_same_count_in_every_batch(model, texts, repeats):
    tokenizer = LocalTokenizer(model)
    alone = tuple(tokenizer.count_texts([text])[0] for text in texts)
    assert tokenizer.count_texts(texts * repeats) == alone * repeats
    chats = [(Message(role="user", content=text),) for text in texts]
    assert tokenizer.count_chats(chats) == tuple(tokenizer.count_chats([chat])[0] for chat in chats)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{%- for m in messages -%}\n  [{{ m.role }}]\n{%- endfor %}", "[system][user][assistant][user]"),
        ("  {% if add_generation_prompt %}\nyes\n  {% endif %}\n", "yes\n"),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "What is 17 plus 25?"}'),
        ("{% generation %}{{ messages[2].content }}{% endgeneration %}", "42"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "system"),
        ("{{ bos_token }}{{ eos_token }}{% if tools %}tools{% endif %}", "<s></s>"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "4",
        ),
        ([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}], "plain"),
    ],
    ids=["whitespace", "blocks", "tojson", "generation", "break", "tokens", "date", "namespace", "default"],
)
def test_templates_are_rendered_as_transformers_renders_them(copy, template, written):
    with_template(copy, template, bos_token={"content": "<s>", "lstrip": False}, eos_token="</s>")
    assert ChatTemplate(copy).render(CONVERSATION) == written


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ 'x' * 20000000 }}",
    ],
    ids=["time", "memory", "memory by doubling", "text"],
)
def test_a_template_that_takes_more_than_any_honest_one_is_refused(copy, template, monkeypatch):
    monkeypatch.setattr(chat_template, "TEMPLATE_S", 1)
    with_template(copy, template)
    limits = "its chat template takes more than 1 s of processor time, 1,024 MiB of mem"
    with pytest.raises(UsageError, match=limits):
        LocalTokenizer(copy).count_chats([USER])


def test_a_template_in_a_file_of_its_own_takes_precedence_and_that_of_a_processor_counts_without_another(copy):
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert ChatTemplate(with_template(copy, None)).render(USER) == "of the processor"
    (copy / "chat_template.jinja").write_text("of its own")
    assert ChatTemplate(with_template(copy, "of the configuration")).render(USER) == "of its own"


def test_variables_of_a_request_reach_its_template(copy):
    with_template(copy, "{{ messages[0].content }}{% if enable_thinking %} Think about it.{% endif %}")
    plain, thinking = (LocalTokenizer(copy, kwargs) for kwargs in (None, {"enable_thinking": True}))
    assert thinking.count_chats([USER]) > plain.count_chats([USER])


def test_a_model_without_a_template_counts_completions_and_refuses_chats(copy):
    tokenizer = LocalTokenizer(with_template(copy, None))
    assert tokenizer.count_texts(["hello"]) > (0,)
    assert tokenizer.count_chats([]) == ()
    with pytest.raises(UsageError, match=r"has no chat template .* instruct model in workload\.tokenizer"):
        tokenizer.count_chats([USER])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "the chat template is damaged"),
        ("{{ raise_exception('no system role') }}", "refuses a chat of user: no system role"),
        ("{{ messages[7].content }}", "refuses a chat of user"),
        ("{{ messages.__class__.__mro__ }}", "refuses a chat of user"),
        ("{{ messages[0].pop('role') }}", "refuses a chat of user"),
    ],
    ids=["damaged", "refusal", "missing", "escape", "change"],
)
def test_templates_that_fail_are_named_with_their_file(copy, template, message):
    with pytest.raises(UsageError, match=rf"tokenizer_config\.json: .*{re.escape(message)}"):
        LocalTokenizer(with_template(copy, template)).count_chats([USER])


def test_a_file_that_is_no_tokenizer_or_a_missing_package_is_named(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"tokenizer\.json: cannot be read"):
        LocalTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer\.json is damaged or no tokenizer"):
        LocalTokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"-m pip install tokenizers"):
        LocalTokenizer(tmp_path)


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
@settings(max_examples=25)
def test_any_tokenizer_counts_exactly_the_planned_length(kind_name: str, sizes: list[int], seed: int) -> None:
    tokenizer = kind(kind_name)
    plans = [numbers_of_prompt(size, i, seed) for i, size in enumerate(sizes)]
    alphabet = alphabet_of(tokenizer.count_texts)
    written = write_texts(plans, tokenizer.count_texts, alphabet)
    texts = [written[plan] for plan in plans]
    assert [text.num_tokens for text in texts] == sizes
    assert tokenizer.count_texts([text.text for text in texts]) == tuple(sizes)
    assert write_texts(plans, tokenizer.count_texts, alphabet) == written


@given(
    kind_name=st.sampled_from(sorted(KINDS)),
    beginning=st.lists(st.integers(0, 200_000), min_size=20, max_size=200),
    tails=st.lists(st.lists(st.integers(0, 200_000), min_size=20, max_size=50), min_size=2, max_size=4),
)
@settings(max_examples=15)
def test_plans_that_share_a_beginning_give_texts_and_tokens_that_share_it(
    kind_name: str, beginning: list[int], tails: list[list[int]]
) -> None:
    tokenizer = kind(kind_name)
    plans = [(*beginning, *tail) for tail in tails]
    alphabet = alphabet_of(tokenizer.count_texts)
    texts = [write_texts(plans, tokenizer.count_texts, alphabet)[plan].text for plan in plans]
    shared = alphabet.text(beginning)
    assert all(text.startswith(shared) for text in texts)
    if isinstance(tokenizer, TrainedTokenizer):
        ids = [tokenizer.ids(text)[: len(beginning)] for text in texts]
        assert all(each == ids[0] for each in ids)


@given(kind_name=st.sampled_from(sorted(KINDS)), sizes=st.lists(st.integers(60, 300), min_size=1, max_size=4))
@settings(max_examples=12)
def test_a_planned_length_of_a_chat_includes_the_template(kind_name: str, sizes: list[int]) -> None:
    tokenizer = kind(kind_name)
    counted = list(counted_prompts([planned(size, i) for i, size in enumerate(sizes)], tokenizer, chat=True))
    assert [prompt.num_tokens for prompt in counted] == sizes
    assert all(prompt.text is None and [turn.role for turn in prompt.messages] == ["user"] for prompt in counted)
    assert tokenizer.count_chats([prompt.messages for prompt in counted]) == tuple(sizes)


def planned(size: int, index: int = 0) -> Prompt:
    return Prompt(prompt_id=f"p-{index}", source=f"p:{index}", token_numbers=numbers_of_prompt(size, index, seed=0))


@pytest.mark.parametrize("kind_name", sorted(set(KINDS) - {"estimate"}))
def test_few_calls_and_few_texts_are_counted_however_many_prompts(kind_name: str) -> None:
    tokenizer = kind(kind_name)
    tokenizer.calls.clear()
    list(counted_prompts([planned(100, i) for i in range(500)], tokenizer, chat=False))
    assert len(tokenizer.calls) <= 12
    assert sum(tokenizer.calls) < 2500 + 2 * 500


def test_the_first_prompts_are_counted_before_the_last_are_made() -> None:
    made = count()
    prompts = (planned(20, next(made)) for _ in range(5000))
    counted = counted_prompts(prompts, Estimate(), chat=False)
    assert next(counted).num_tokens == 20
    assert next(made) < 2000
    assert [prompt.num_tokens for prompt in counted] == [20] * 4999


def test_a_length_that_a_template_fills_by_itself_names_the_least() -> None:
    tokenizer = kind("words")
    (template,) = tokenizer.count_chats([[]])
    message = r"planned with 7 tokens, but the server adds (\d+) .*plan at least (\d+).*workload\.chat"
    with pytest.raises(ProfileError, match=message) as raised:
        next(counted_prompts([planned(7)], tokenizer, chat=True))
    least = int(str(raised.value).partition("at least ")[2].split(",")[0])
    assert next(counted_prompts([planned(least)], tokenizer, chat=True)).num_tokens == least > template
