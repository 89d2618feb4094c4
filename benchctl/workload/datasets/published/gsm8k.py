"""GSM8K: grade-school word problems with gold answers, in the official JSON Lines format.

Rows hold ``question`` and ``answer``; the gold answer follows ``####``. The chat is that of the LenVM evaluation:
Qwen's stock system sentence, then an instruction to reason step by step and to box the final answer, a blank
line, and the question.
"""

from typing import Final

import msgspec

from benchctl.records.record import Message
from benchctl.workload.datasets.base import (
    DatasetFile,
    FileDataset,
    Prompt,
    Selection,
    SourceFile,
    damaged_row,
    read_jsonl_rows,
)
from benchctl.workload.tokenizers import Tokenizer

SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
INSTRUCTION = r"Solve this problem step by step, and give the final answer within \boxed{}."


class Gsm8kRow(msgspec.Struct, frozen=True):
    """One line of ``test.jsonl``."""

    question: str
    answer: str


def gsm8k_prompts(file: SourceFile, selection: Selection, _tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The selected questions with their gold answers."""
    problems: list[tuple[str, str]] = []
    for number, row in read_jsonl_rows(file.path, Gsm8kRow):
        answer = gold_answer(row.answer)
        if answer is None:
            raise damaged_row(file.path, number, "the answer has no gold value after '####'")
        problems.append((row.question, answer))
    prompts = (
        question_prompt(question, prompt_id=f"gsm8k-{i:05d}", source=f"{file.dataset}:{i}", answer=answer)
        for i, (question, answer) in ((i, problems[i]) for i in selection.row_order(len(problems)))
    )
    return selection.take(prompts, file)


def gold_answer(solution: str) -> str | None:
    """The text after the last ``####``, without the commas that group digits; None without one."""
    _, mark, gold = solution.rpartition("####")
    return gold.strip().replace(",", "") or None if mark else None


def question_prompt(question: str, *, prompt_id: str, source: str, answer: str) -> Prompt:
    """A word problem as a chat."""
    messages = (
        Message(role="system", content=SYSTEM),
        Message(role="user", content=f"{INSTRUCTION}\n\n{question}"),
    )
    return Prompt(
        prompt_id=prompt_id,
        source=source,
        messages=messages,
        answer=answer,
    )


DATASET: Final = FileDataset(
    file=DatasetFile(
        name="gsm8k",
        label="gsm8k/test",
        folder="gsm8k",
        filename="test.jsonl",
        url="https://raw.githubusercontent.com/openai/grade-school-math/"
        "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/test.jsonl",
        sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        size_bytes=749_738,
        licence="MIT",
        source_page="https://github.com/openai/grade-school-math",
    ),
    read=gsm8k_prompts,
    is_replaceable=True,
)
