"""Conversations: turns with all that came before them, and what the server said put in its place.

    turns ▸ chats with their history ▸ counted ▸ requests ▸ calls with marks for answers ▸ sent one by one

The request set holds each turn as a whole chat, in which an answer that the server will give is empty. In the body
that is sent a mark stands for it, which the client replaces: engines and processes of the client know nothing of
answers, and the hash of the set is that of the plan. The turns of a conversation are neighbours in the set.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat
from typing import Final

from msgspec.structs import replace

from benchctl.profile.model import Turns
from benchctl.records.files import encode
from benchctl.records.record import Call, Message, PreparedRequest
from benchctl.units import NS_PER_S
from benchctl.workload.datasets.base import Prompt
from benchctl.workload.seeded import lognormal, named_stream
from benchctl.workload.tokenizers import Tokenizer
from benchctl.workload.written_texts import counted_prompts

_MARK: Final = "benchctl-answer-5f1d9c3e8b7a4206"
"""Stands for an answer of the server; a body is taken apart at its marks before an answer is put into it."""


def as_conversations(
    prompts: Iterable[Prompt], limits: Sequence[int], turns: Turns, tokenizer: Tokenizer, seed: int
) -> Iterator[tuple[Prompt, int]]:
    """Each turn as the chat up to it, with its limit of output tokens, until its conversation would be too long.

    ``prompts`` are the words of the user, turn by turn. ``num_tokens`` counts answers of the server with their
    limits, which is the most that they can have. Think times are log-normal, from the stream ``think``.
    """
    thinks = named_stream(seed, "think")
    chats = counted_prompts(_with_history(prompts, turns), tokenizer, chat=True)
    for session, conversation in groupby(zip(chats, limits, strict=True), key=lambda pair: pair[0].prompt_id):
        answer_tokens = shared = 0
        for prompt, limit in conversation:
            num_tokens = (prompt.num_tokens or 0) + answer_tokens
            if prompt.turn and num_tokens + limit > turns.max_tokens:
                break
            think_s = turns.think_s * lognormal(1.0, turns.think_cv, thinks) if prompt.turn else 0.0
            of_turn = {"session": session, "prompt_id": f"{session}-t{prompt.turn:02d}", "shared": shared}
            yield replace(prompt, num_tokens=num_tokens, think_ns=round(think_s * NS_PER_S), **of_turn), limit
            of_server = limit if turns.answers == "real" else 0
            answer_tokens, shared = answer_tokens + of_server, num_tokens + of_server


def _with_history(prompts: Iterable[Prompt], turns: Turns) -> Iterator[Prompt]:
    history: tuple[Message, ...] = ()
    for prompt in prompts:
        messages = (*(history if prompt.turn else ()), *(prompt.messages or ()))
        yield replace(prompt, messages=messages)
        reply = prompt.reply if turns.answers == "recorded" else None
        history = (*messages, Message(role="assistant", content=reply or ""))


def thinks_before(requests: Iterable[PreparedRequest]) -> dict[int, int]:
    """By the position of each later turn the ns that its user thinks; the turn before it is its neighbour."""
    return {i: request.think_ns for i, request in enumerate(requests) if request.turn}


def with_answers_in(request: PreparedRequest, answers: Iterable[str] = repeat(_MARK)) -> PreparedRequest:
    """A turn with these in place of the server's answers before it, which are empty; else with their marks."""
    texts = iter(answers)
    return replace(
        request,
        messages=tuple(
            replace(message, content=next(texts))
            if message.role == "assistant" and not message.content
            else message
            for message in request.messages or ()
        ),
    )


def with_answers(call: Call, answers: Sequence[str]) -> Call:
    """The call of a later turn with the server's answers to the turns before it in place of the marks."""
    first, *others = call.body.split(_MARK.encode())
    filled = (encode(answer)[1:-1] + part for answer, part in zip(answers, others, strict=False))
    return replace(call, body=first + b"".join(filled))


def grouped(calls: Iterable[Call]) -> Iterator[tuple[Call, ...]]:
    """The turns of each conversation together, all other calls alone."""
    groups = groupby(
        calls, key=lambda call: call.request.request_id if call.request.turn is None else call.request.session
    )
    return (tuple(turns) for _, turns in groups)
