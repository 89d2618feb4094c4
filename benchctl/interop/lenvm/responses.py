"""Answers as the LenVM client writes them: a line for each choice, or one for a request that failed.

``usage`` belongs to a request and is copied to each of its choices, so that a plain sum counts it n times. Lines
are appended, also by a client that is started again: a question may have failed first and been answered later.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from benchctl.records.finish_reasons import MOST_WORD_CHARS
from benchctl.records.record import ChoiceRecord
from benchctl.untrusted.reading import DECODING_ERRORS

JsonObject = Mapping[str, Any]
_MOST_COUNT: Final = 1 << 53
_DAY_S: Final = 86_400.0
_Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MOST_COUNT)]


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    idx: _Index
    choice_idx: _Index | None = None
    question: str | None = None
    answer: Any = None
    request: dict[str, Any] = {}
    usage: dict[str, Any] | None = None
    choice: dict[str, Any] | None = None
    text: str | None = None
    error: Any = None
    elapsed_s: Annotated[float, msgspec.Meta(ge=0, le=_DAY_S)] | None = None

    @property
    def is_failure(self) -> bool:
        return self.error is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The outcome of one question; of several attempts the last that was answered, or else the last.

    ``usage`` counts the prompt once and the output of all choices; ``elapsed_s`` includes the client's retries.
    """

    idx: int
    question: str | None
    gold: str | None
    body: JsonObject
    choices: tuple[ChoiceRecord, ...]
    prompt_tokens: int | None
    completion_tokens: int | None
    elapsed_s: float | None
    error: str | None
    num_rows: int
    """Lines of this attempt."""
    num_attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """All questions in the order of their numbers, and the count of damaged lines."""

    answered: tuple[Answered, ...]
    num_rows: int
    row_latencies_s: tuple[float, ...]
    """Latency of every line that has one, in the order of the file."""
    num_damaged: int = 0
    is_cut: bool = False


def read_responses(lines: Iterable[bytes]) -> Responses:
    """The answers in these lines, given with their line ends. Damaged lines are counted, not raised."""
    decoder = msgspec.json.Decoder(_Row, strict=False)
    rows: list[_Row] = []
    num_damaged, is_cut = 0, False
    for line in lines:
        if not line.strip():
            continue
        try:
            rows.append(decoder.decode(line))
        except DECODING_ERRORS:
            is_cut = not line.endswith(b"\n")
            num_damaged += not is_cut
    by_question: dict[int, list[_Row]] = {}
    for row in rows:
        by_question.setdefault(row.idx, []).append(row)
    return Responses(
        answered=tuple(_answered(idx, of_question) for idx, of_question in sorted(by_question.items())),
        num_rows=len(rows),
        row_latencies_s=tuple(row.elapsed_s for row in rows if row.elapsed_s is not None),
        num_damaged=num_damaged,
        is_cut=is_cut,
    )


def _answered(idx: int, rows: Sequence[_Row]) -> Answered:
    attempts = _attempts(rows)
    last = next((attempt for attempt in reversed(attempts) if not attempt[0].is_failure), attempts[-1])
    first = last[0]
    usage = next((row.usage for row in last if row.usage), {})
    return Answered(
        idx=idx,
        question=first.question,
        gold=None if first.answer is None else str(first.answer),
        body=first.request,
        choices=() if first.is_failure else tuple(_choice(i, row) for i, row in enumerate(last)),
        prompt_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        completion_tokens=_count(usage, "completion_tokens", "output_tokens"),
        elapsed_s=first.elapsed_s,
        error=_text(first.error) if first.is_failure else None,
        num_rows=len(last),
        num_attempts=len(attempts),
    )


def _attempts(rows: Sequence[_Row]) -> list[list[_Row]]:
    """The lines of a question, split at each failed request and at each repeated choice."""
    attempts: list[list[_Row]] = []
    choices: set[int | None] = set()
    for row in rows:
        if not attempts or row.is_failure or attempts[-1][0].is_failure or row.choice_idx in choices:
            attempts.append([])
            choices = set()
        attempts[-1].append(row)
        choices.add(row.choice_idx)
    return attempts


def _choice(position: int, row: _Row) -> ChoiceRecord:
    reason = (row.choice or {}).get("finish_reason")
    reason = reason.get("type") if isinstance(reason, dict) else reason  # as SGLang's own API states it
    return ChoiceRecord(
        index=position if row.choice_idx is None else row.choice_idx,
        text=row.text or "",
        finish_reason=reason[:MOST_WORD_CHARS] if isinstance(reason, str) else None,
    )


def _count(usage: JsonObject, *names: str) -> int | None:
    value = next((usage[name] for name in names if usage.get(name) is not None), None)
    return value if type(value) is int and 0 <= value <= _MOST_COUNT else None


def _text(error: object) -> str:
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()
