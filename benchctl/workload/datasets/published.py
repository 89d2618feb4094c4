"""Published data sets: word problems, conversations, and recorded traces of real traffic, and how they are fetched.

Traces hold no text; prompts are written to the recorded length, so that they share what the trace says they share.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec.structs import replace

from benchctl.errors import DatasetError
from benchctl.records.record import Message
from benchctl.units import NS_PER_MS, NS_PER_S
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.files import DECODING_ERRORS, UnreadableError, decoding_problem, read_csv
from benchctl.untrusted.text import visible_value
from benchctl.workload.datasets.base import (
    DATA_DIRECTORY_VARIABLE,
    DatasetFile,
    FileDataset,
    Length,
    Prompt,
    Reader,
    Selection,
    SourceFile,
    TraceRow,
    checked_trace,
    damaged_row,
    prompts_of_trace,
    read_file,
    read_jsonl_rows,
    unreadable,
)
from benchctl.workload.tokenizers import Tokenizer

if TYPE_CHECKING:
    from tqdm import tqdm

_LAST_NS: Final = 1 << 62
_TIMEOUT_S: Final = (10.0, 30.0)
"""To connect, and between two pieces."""


def fetch_dataset(file: DatasetFile, directory: Path, progress: "tqdm[Any] | None") -> Path:
    """Fetch a file into the data directory unless it is there; return its path.

    A damaged file is replaced. Raises DatasetError, with the remedy, when it cannot be fetched whole.
    """
    target = file.path_in(directory)
    import pooch  # noqa: PLC0415 - its import takes a while, and most commands fetch nothing

    pooch.get_logger().setLevel("WARNING")  # it would print addresses and hashes
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        pooch.retrieve(
            file.url,
            known_hash=f"sha256:{file.sha256}",
            fname=target.name,
            path=target.parent,
            downloader=pooch.HTTPDownloader(progressbar=progress, timeout=_TIMEOUT_S),
        )
    except (OSError, ValueError) as error:  # ValueError: another sha256
        if isinstance(error, OSError) and error.strerror is not None:  # a failed request has no error number
            raise DatasetError(
                f"{target} cannot be written: {error.strerror}; make room or set {DATA_DIRECTORY_VARIABLE} to "
                "another directory"
            ) from error
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DatasetError(
            f"{file.name} could not be fetched from {file.url}: {reason}. Run 'benchctl data fetch {file.name}' "
            f"again, or copy the file, which {file.source_page} describes, to {target}"
        ) from error
    return target


SYSTEM: Final = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
INSTRUCTION: Final = r"Solve this problem step by step, and give the final answer within \boxed{}."
"""The chat of the LenVM evaluation: Qwen's stock system sentence, an instruction, a blank line, the question."""


class Gsm8kRow(msgspec.Struct, frozen=True):
    """One line of ``test.jsonl``; the gold answer follows ``####``."""

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
        for i, question, answer in ((i, *problems[i]) for i in selection.row_order(len(problems)))
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
    return Prompt(prompt_id=prompt_id, source=source, messages=messages, answer=answer)


MAX_PROMPT_TOKENS: Final = 1024
MAX_TOTAL_TOKENS: Final = 2048
LEAST_TOKENS: Final = 4
"""Rules of ``vllm bench serve`` for the lengths of prompt and answer of a conversation."""


class Turn(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    speaker: str = msgspec.field(name="from")
    value: str


class Conversation(msgspec.Struct, frozen=True):
    """One element of the list; its id is not needed."""

    conversations: tuple[Turn, ...] = ()


def sharegpt_prompts(file: SourceFile, selection: Selection, tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """The selected usable conversations: the first turn is the prompt, the second gives the length of the output.

    The first two turns must be those of a human and of the model. Lengths are those of the tokenizer of the request
    set, counted only until enough are selected; an estimate can keep other rows than the model's tokenizer. Of
    conversations, those of two turns at least, each further pair of turns is a prompt behind the first.
    """
    content = read_file(file.path)
    try:
        rows = msgspec.json.decode(content, type=list[Conversation])
    except DECODING_ERRORS as error:
        raise DatasetError(
            f"{file.path}: {decoding_problem(error)}. Expected a JSON list of objects with 'conversations' of "
            "'from' and 'value': fetch the file again with 'benchctl data fetch sharegpt', or correct workload.path"
        ) from error
    answered = ((i, _exchanges(rows[i].conversations, selection.turns)) for i in selection.row_order(len(rows)))
    usable = _usable(((i, pairs) for i, pairs in answered if pairs), file.dataset, tokenizer)
    selected = selection.take((first for first in usable if first.later or selection.turns == 1), file)
    return tuple(chain.from_iterable((first, *first.later) for first in selected))


def _exchanges(turns: Sequence[Turn], most: int) -> list[tuple[str, str]]:
    """Pairs of what the human said and the model answered, from the first turn on, until turns are no such pair."""
    pairs = zip(turns[: 2 * most : 2], turns[1 : 2 * most : 2], strict=False)
    alternating = takewhile(lambda pair: [turn.speaker for turn in pair] == ["human", "gpt"], pairs)
    return [(human.value, model.value) for human, model in alternating]


def _usable(
    rows: Iterator[tuple[int, list[tuple[str, str]]]], dataset: str, tokenizer: Tokenizer
) -> Iterator[Prompt]:
    """The first turn of each row where it is within the rules, with those behind it until one is too short, counted
    batch by batch.
    """
    # Conversations whose lengths are counted in one call
    while batch := list(islice(rows, 64)):
        counts = iter(tokenizer.count_texts([text for _, pairs in batch for pair in pairs for text in pair]))
        for i, pairs in batch:
            turns = [
                Prompt(
                    prompt_id=f"sharegpt-{i:05d}",
                    source=f"{dataset}:{i}",
                    text=prompt,
                    num_tokens=next(counts),
                    output_tokens=next(counts),
                    turn=turn,
                    reply=reply,
                )
                for turn, (prompt, reply) in enumerate(pairs)
            ]
            if is_usable(turns[0].num_tokens or 0, turns[0].output_tokens or 0):
                long_enough = takewhile(
                    lambda turn: min(turn.num_tokens or 0, turn.output_tokens or 0) >= LEAST_TOKENS, turns[1:]
                )
                yield replace(turns[0], later=tuple(long_enough))


def is_usable(prompt_tokens: int, output_tokens: int) -> bool:
    """True if the lengths of a conversation are within the rules."""
    return (
        min(prompt_tokens, output_tokens) >= LEAST_TOKENS
        and prompt_tokens <= MAX_PROMPT_TOKENS
        and prompt_tokens + output_tokens <= MAX_TOTAL_TOKENS
    )


class ReplayRow(msgspec.Struct, frozen=True):
    """One recorded request. Its text cannot be restored without the tokenizer, so each id becomes a word of its
    own: prompts that shared a prefix still do.
    """

    input_toks: Length
    output_toks: Length
    arrival_time_ns: Annotated[int, msgspec.Meta(le=_LAST_NS)]
    input_tok_ids: tuple[int, ...] | None = None


def replay_trace(file: SourceFile) -> list[TraceRow]:
    """ShareGPT requests in the JSON Lines format of LLMServingSim."""
    rows = read_jsonl_rows(file.path, ReplayRow)
    for number, row in rows:
        if row.input_tok_ids is not None and len(row.input_tok_ids) != row.input_toks:
            problem = f"input_toks is {row.input_toks}, but there are {len(row.input_tok_ids)} input_tok_ids"
            raise damaged_row(file.path, number, problem)
    traced = (
        (
            number,
            TraceRow(
                arrival_ns=row.arrival_time_ns,
                prompt_tokens=row.input_toks,
                output_tokens=row.output_toks,
                token_ids=row.input_tok_ids,
            ),
        )
        for number, row in rows
    )
    return checked_trace(file, traced)


class MooncakeRow(msgspec.Struct, frozen=True):
    """One recorded request: ``timestamp`` in milliseconds, lengths in tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=4e12)]
    input_length: Length
    output_length: Length
    hash_ids: tuple[int, ...] = ()


def mooncake_trace(file: SourceFile) -> list[TraceRow]:
    """Mooncake's traces as JSON Lines, released with the paper at FAST'25."""
    rows = read_jsonl_rows(file.path, MooncakeRow)
    first_ms = min((row.timestamp for _, row in rows), default=0.0)
    traced = (
        (
            number,
            TraceRow(
                arrival_ns=round((row.timestamp - first_ms) * NS_PER_MS),
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                block_ids=row.hash_ids,
            ),
        )
        for number, row in rows
    )
    return checked_trace(file, traced)


AZURE_HEADER: Final = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_TIMESTAMP: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?")


def azure_trace(file: SourceFile) -> list[TraceRow]:
    """Azure's LLM inference trace as CSV; arrivals count from the first row."""
    try:
        return checked_trace(file, _azure_rows(file))
    except UnreadableError as error:
        raise unreadable(error) from error


def _azure_rows(file: SourceFile) -> Iterator[tuple[int, TraceRow]]:
    lines = read_csv(file.path, ROWS_BYTES)
    _, header = next(lines, (1, []))
    if header != AZURE_HEADER:
        raise DatasetError(
            f"{file.path}:1: the header is {visible_value(','.join(header))}, not {','.join(AZURE_HEADER)!r}; "
            "correct workload.path, or fetch the trace with 'benchctl data fetch azure-trace'"
        )
    times_ns: list[int] = []
    for number, (time, context_tokens, generated_tokens) in lines:
        try:
            times_ns.append(timestamp_ns(time))
            prompt_tokens, output_tokens = int(context_tokens), int(generated_tokens)
        except ValueError as error:
            raise damaged_row(file.path, number, decoding_problem(error)) from error
        if not max(times_ns[-2:]) == times_ns[-1] <= _LAST_NS:
            problem = f"timestamp {time!r} is before that of the previous row, or not of this century"
            raise damaged_row(file.path, number, problem)
        arrival_ns = times_ns[-1] - times_ns[0]
        yield number, TraceRow(arrival_ns=arrival_ns, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def timestamp_ns(text: str) -> int:
    """Nanoseconds since 1970 of ``2023-11-16 18:15:46.6805900``, exactly. Raises ValueError for anything else.

    Timestamps carry seven decimals (100 ns), one more than ``datetime`` has.
    """
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise ValueError(f"timestamp {text!r} is not of the form 2023-11-16 18:15:46.6805900")
    moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    return int(moment.timestamp()) * NS_PER_S + int((match[2] or "").ljust(9, "0"))


def _prompts_of(read_trace: Callable[[SourceFile], list[TraceRow]]) -> Reader:
    return lambda file, selection, _tokenizer: prompts_of_trace(read_trace(file), file, selection)


DATASETS: Final = {
    "gsm8k": FileDataset(
        meaning="GSM8K: grade-school word problems with gold answers, in the official JSON Lines format.",
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
    ),
    "sharegpt": FileDataset(
        meaning='ShareGPT: conversations as a JSON list of {"id", "conversations": [{"from", "value"}]}.',
        file=DatasetFile(
            name="sharegpt",
            label="sharegpt/v3-unfiltered-cleaned",
            folder="sharegpt",
            filename="ShareGPT_V3_unfiltered_cleaned_split.json",
            url="https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve/"
            "192ab2185289094fc556ec8ce5ce1e8e587154ca/ShareGPT_V3_unfiltered_cleaned_split.json",
            sha256="35f0e213ce091ed9b9af2a1f0755e9d39f9ccec34ab281cd4ca60d70f6479ba4",
            size_bytes=672_837_942,
            licence="Apache-2.0",
            source_page="https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered",
        ),
        read=sharegpt_prompts,
        has_output_lengths=True,
        is_replaceable=True,
    ),
    "sharegpt-replay": FileDataset(
        meaning="ShareGPT replay: recorded lengths, token ids and arrivals, as JSON Lines of LLMServingSim.",
        file=DatasetFile(
            name="sharegpt-replay",
            label="sharegpt-replay/llama-3.1-8b-300-sps10",
            folder="sharegpt",
            filename="sharegpt-llama-3.1-8b-300-sps10.jsonl",
            url="https://raw.githubusercontent.com/casys-kaist/LLMServingSim/"
            "5daddb21a545658d5150b535712d0494584b5278/workloads/sharegpt-llama-3.1-8b-300-sps10.jsonl",
            sha256="05e48b32da530d4a3dd77f3d47c6fe694ac8308d611aa088e38bb10fba2b3b3a",
            size_bytes=2_574_379,
            licence="MIT",
            source_page="https://github.com/casys-kaist/LLMServingSim",
        ),
        read=_prompts_of(replay_trace),
        read_trace=replay_trace,
        has_output_lengths=True,
    ),
    "azure-trace": FileDataset(
        meaning="Azure LLM inference trace: arrivals and lengths of real traffic, as CSV "
        "TIMESTAMP,ContextTokens,GeneratedTokens.",
        file=DatasetFile(
            name="azure-trace",
            label="azure-trace/conv-2023",
            folder="azure",
            filename="AzureLLMInferenceTrace_conv.csv",
            url="https://raw.githubusercontent.com/Azure/AzurePublicDataset/"
            "b469a113cedca53ddc3bdea71a143dc4b7d8700c/data/AzureLLMInferenceTrace_conv.csv",
            sha256="2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
            size_bytes=719_188,
            licence="CC-BY-4.0",
            source_page="https://github.com/Azure/AzurePublicDataset",
        ),
        read=_prompts_of(azure_trace),
        read_trace=azure_trace,
        has_output_lengths=True,
    ),
    "mooncake": FileDataset(
        meaning="Mooncake's traces: arrivals, lengths and shared prefixes of real traffic, as JSON Lines.",
        file=DatasetFile(
            name="mooncake",
            label="mooncake/fast25-conversation",
            folder="mooncake",
            filename="conversation_trace.jsonl",
            url="https://raw.githubusercontent.com/kvcache-ai/Mooncake/"
            "3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces/conversation_trace.jsonl",
            sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
            size_bytes=3_029_533,
            licence="Apache-2.0",
            source_page="https://github.com/kvcache-ai/Mooncake",
        ),
        read=_prompts_of(mooncake_trace),
        read_trace=mooncake_trace,
        has_output_lengths=True,
    ),
}
