"""Dataset files: found, pinned, read; each kind of damage named with its place and its remedy."""

import json
from pathlib import Path

import pytest
from support.datasets import DATA, first, needs_data, source
from support.tokenizer_kinds import byte_level

from benchctl.errors import DatasetError
from benchctl.workload.datasets.base import (
    Selection,
    SourceFile,
    data_directory,
    dataset_file,
    dataset_files,
    file_state,
    find_source,
    sha256_of,
)
from benchctl.workload.datasets.published import gold_answer, gsm8k_prompts, sharegpt_prompts
from benchctl.workload.tokenizers import Estimate

GSM8K_FILE = dataset_file("gsm8k")


def sample(num_prompts: int, seed: int = 0) -> Selection:
    return Selection(num_prompts=num_prompts, method="sample", seed=seed)


def write_gsm8k(path: Path, num_rows: int = 5) -> Path:
    rows = [{"question": f"What is {i} + {i}?", "answer": f"Add.\n#### {2 * i}"} for i in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# GSM8K


def test_gsm8k_gives_the_first_questions_in_file_order_as_a_chat_with_gold_answer(tmp_path: Path) -> None:
    prompts = gsm8k_prompts(source(write_gsm8k(tmp_path / "test.jsonl"), "gsm8k"), first(2), Estimate())
    assert [prompt.prompt_id for prompt in prompts] == ["gsm8k-00000", "gsm8k-00001"]
    assert [prompt.answer for prompt in prompts] == ["0", "2"]
    assert prompts[1].source == "gsm8k:1"
    assert prompts[1].messages is not None
    system, user = prompts[1].messages
    assert (system.role, user.role) == ("system", "user")
    assert system.content.startswith("You are Qwen, created by Alibaba Cloud.")
    instruction, question = user.content.split("\n\n")
    assert "step by step" in instruction
    assert r"\boxed{}" in instruction
    assert question == "What is 1 + 1?"


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        ("so\n#### 70,000", "70000"),
        ("#### -3 ", "-3"),
        ("a #### 1\n#### 2.5", "2.5"),
        ("none", None),
        ("####", None),
    ],
)
def test_gold_answer_is_what_follows_the_mark_without_grouping_commas(solution: str, gold: str | None) -> None:
    assert gold_answer(solution) == gold


def test_a_truncated_line_is_named_with_file_line_and_remedy(tmp_path: Path) -> None:
    path = write_gsm8k(tmp_path / "test.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DatasetError, match=r"test\.jsonl:5: .*the line begins .*benchctl data fetch"):
        gsm8k_prompts(source(path, "gsm8k"), first(2), Estimate())


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n\n{"question": "q", "answer": "unmarked"}\n')
    with pytest.raises(DatasetError, match=r"test\.jsonl:3: the answer has no gold value after '####'"):
        gsm8k_prompts(source(path, "gsm8k"), first(1), Estimate())


@pytest.mark.parametrize(
    "line", [b'{"question": 3, "answer": "#### 1"}', b'{"answer": "#### 1"}', b"[]", b"\xff\xfe"]
)
def test_a_row_of_another_shape_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "test.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(DatasetError, match=r"test\.jsonl:1: .*another format"):
        gsm8k_prompts(source(path, "gsm8k"), first(1), Estimate())


def test_fewer_rows_than_asked_are_refused_with_the_number_there_is(tmp_path: Path) -> None:
    path = write_gsm8k(tmp_path / "test.jsonl")
    with pytest.raises(
        DatasetError, match=r"6 prompts are asked for, but gsm8k has only 5 .*num_prompts to at most 5"
    ):
        gsm8k_prompts(source(path, "gsm8k"), first(6), Estimate())


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"cannot be read: Is a directory; .* correct workload\.path"):
        gsm8k_prompts(source(tmp_path, "gsm8k"), first(1), Estimate())


def test_a_sample_is_seeded_and_grows_without_changing_what_it_had(tmp_path: Path) -> None:
    file = source(write_gsm8k(tmp_path / "test.jsonl", 50), "gsm8k")
    small, large, other = (
        gsm8k_prompts(file, chosen, Estimate()) for chosen in (sample(5), sample(20), sample(5, seed=1))
    )
    assert large[:5] == small
    assert small != other
    assert small != gsm8k_prompts(file, first(5), Estimate())
    assert len({prompt.prompt_id for prompt in large}) == 20


@needs_data
def test_the_real_gsm8k_is_the_pinned_file_and_its_prompts_are_as_long_as_published() -> None:
    file = find_source(GSM8K_FILE, None, DATA)
    assert file is not None
    assert file.dataset == "gsm8k/test"
    prompts = gsm8k_prompts(file, first(1319), Estimate())
    assert prompts[0].answer == "18"
    assert prompts[2].answer == "70000"
    # 102 to 106 tokens a prompt over the first 50 questions is what was measured with Qwen's tokenizer.
    assert sum(Estimate().count_chats([prompt.messages or () for prompt in prompts[:50]])) / 50 == pytest.approx(
        104, abs=2
    )
    assert all(prompt.answer and prompt.answer.lstrip("-").replace(".", "").isdigit() for prompt in prompts)


# ShareGPT

LONG = "word " * 1025


def conversation(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": speaker, "value": value} for speaker, value in turns]}


def write_sharegpt(path: Path, rows: list[dict[str, object]]) -> SourceFile:
    path.write_text(json.dumps(rows))
    return source(path, "sharegpt")


GOOD = conversation(("human", "Tell me a story please"), ("gpt", "Once upon a time there was"), ("human", "More"))


@pytest.mark.parametrize(
    "bad",
    [
        conversation(("human", "Only one turn of text here")),
        conversation(("gpt", "Tell me a story please"), ("human", "Once upon a time there was")),
        conversation(("system", "Be a good bot please"), ("gpt", "Once upon a time there was")),
        conversation(("human", "Too short prompt"), ("gpt", "Once upon a time there was")),
        conversation(("human", "Tell me a story please"), ("gpt", "No I won")),
        conversation(("human", LONG), ("gpt", "Once upon a time there was")),
        conversation(("human", "Tell me a story please"), ("gpt", LONG * 2)),
        {"id": "empty"},
    ],
)
def test_sharegpt_leaves_out_conversations_beyond_the_limits(tmp_path: Path, bad: dict[str, object]) -> None:
    file = write_sharegpt(tmp_path / "s.json", [bad, GOOD])
    (prompt,) = sharegpt_prompts(file, first(1), Estimate())
    assert (prompt.prompt_id, prompt.source) == ("sharegpt-00001", "sharegpt:1")
    assert prompt.text == "Tell me a story please"
    assert (prompt.num_tokens, prompt.output_tokens) == (5, 6)
    with pytest.raises(DatasetError, match="only 1 usable rows"):
        sharegpt_prompts(file, first(2), Estimate())


def test_sharegpt_keeps_chinese_and_counts_with_the_tokenizer_it_is_given(tmp_path: Path) -> None:
    row = conversation(("human", "今天天气怎么样"), ("gpt", "晴天很适合散步"))
    file = write_sharegpt(tmp_path / "s.json", [row])
    (estimated,) = sharegpt_prompts(file, first(1), Estimate())
    assert estimated.num_tokens == 5
    tokenizer = byte_level(259)
    (prompt,) = sharegpt_prompts(file, first(1), tokenizer)
    assert (prompt.num_tokens, prompt.output_tokens) == (21, 21)
    assert tokenizer.calls == [2]
    long = write_sharegpt(tmp_path / "l.json", [conversation(("human", "天" * 400), ("gpt", "晴天很适合散步"))])
    assert sharegpt_prompts(long, first(1), Estimate())
    with pytest.raises(DatasetError, match="only 0 usable rows; correct its rows, or name another file"):
        sharegpt_prompts(long, first(1), tokenizer)  # 1,200 bytes, above the limit of 1,024


def test_sharegpt_keeps_conversations_at_the_limits(tmp_path: Path) -> None:
    words = conversation(("human", " ".join(["word"] * 1024)), ("gpt", " ".join(["word"] * 1024)))
    (prompt,) = sharegpt_prompts(write_sharegpt(tmp_path / "s.json", [words]), first(1), Estimate())
    assert (prompt.num_tokens, prompt.output_tokens) == (1024, 1024)


@pytest.mark.parametrize(
    "content", ["[{", '{"id": 1}', '[{"conversations": [{"value": "x"}]}]', '[{"conversations": [{"from": 1}]}]']
)
def test_sharegpt_of_another_shape_is_refused_with_remedy(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(DatasetError, match=r"s\.json: .*JSON list of objects.*data fetch sharegpt"):
        sharegpt_prompts(source(path, "sharegpt"), first(1), Estimate())


# Files


def test_the_data_directory_is_that_of_the_environment_or_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHCTL_DATA_DIR", "~/somewhere")
    assert data_directory() == Path.home() / "somewhere"
    monkeypatch.delenv("BENCHCTL_DATA_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_directory() == tmp_path / "benchctl/data"


def test_addresses_name_a_revision_and_every_file_has_a_licence() -> None:
    for name, file in dataset_files().items():
        assert file.name == name
        assert file.url.startswith("https://")
        assert len(file.sha256) == 64
        assert any(len(part) == 40 for part in file.url.split("/")), file.url
        assert file.licence


def test_an_unknown_dataset_is_refused_with_the_known_ones() -> None:
    names = ", ".join(dataset_files())
    with pytest.raises(DatasetError, match=f"'gsm9k' is not a dataset with a file; choose one of {names}"):
        dataset_file("gsm9k")


def test_a_file_that_is_not_the_pinned_one_is_refused_with_both_hashes(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    path = write_gsm8k(tmp_path / "gsm8k/test.jsonl")
    with pytest.raises(DatasetError) as raised:
        find_source(GSM8K_FILE, None, tmp_path)
    message = str(raised.value)
    assert sha256_of(path) in message
    assert GSM8K_FILE.sha256 in message
    assert "benchctl data fetch gsm8k" in message
    assert "workload.path" in message
    assert file_state(GSM8K_FILE, tmp_path, full=True) == "damaged"
    assert file_state(GSM8K_FILE, tmp_path, full=False) == "damaged"


def test_an_explicit_file_may_have_any_content_and_is_called_after_its_hash(tmp_path: Path) -> None:
    path = write_gsm8k(tmp_path / "mine.jsonl")
    file = find_source(GSM8K_FILE, str(path), tmp_path / "elsewhere")
    assert file is not None
    assert file.dataset == f"gsm8k/sha256-{sha256_of(path)[:16]}"


def test_an_explicit_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"workload\.path is /no/such, which is not a file"):
        find_source(GSM8K_FILE, "/no/such", tmp_path)


def test_a_missing_file_is_none(tmp_path: Path) -> None:
    assert find_source(GSM8K_FILE, None, tmp_path) is None
    assert file_state(GSM8K_FILE, tmp_path, full=True) == "missing"


def test_hashing_an_unreadable_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read: Is a directory"):
        sha256_of(tmp_path)
