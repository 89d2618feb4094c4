"""Texts of exactly the planned number of tokens, for any tokenizer that counts.

A plan is a sequence of numbers, one for each token: equal numbers become equal tokens, so that prompts share the
beginnings that their numbers share. Text works on every engine. A server adds tokens of its own, those of a chat
template or one that begins a text; they belong to the planned length, and the last numbers make room for them.

    alphabet ▸ texts ▸ counted together ▸ those of another length adjusted at their ends, and counted again
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from benchctl.errors import ProfileError
from benchctl.workload.alphabet import Alphabet, Count, alphabet_of

Plan: TypeAlias = tuple[int, ...]

_ROUNDS: Final = 4
"""Times that lengths are adjusted; the alphabet makes nearly all texts exact at once."""
_PROBE: Final = range(8)
_ENDINGS: Final = tuple(f"{blank}{end}" for blank in ("", " ") for end in ("", *".,;:!?-x1aZé"))
"""Ends that are tried where adding and removing pieces misses a length."""


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A text and its tokens as counted, with those that the server adds."""

    text: str
    num_tokens: int


def write_texts(plans: Iterable[Plan], count: Count) -> dict[Plan, WrittenText]:
    """A text for each plan, of as many tokens as it has numbers by ``count``.

    Laws: each text depends on its own plan alone, and plans that share a beginning give texts that share theirs. A
    text that cannot be made exact is as near as was found and says its true length. Raises ProfileError for a plan
    that is no longer than what the server adds by itself.
    """
    distinct = list(dict.fromkeys(plans))
    if not distinct:
        return {}
    alphabet = alphabet_of(count)
    num_added = _num_added(alphabet, distinct, count)
    lengths = {plan: len(plan) - num_added for plan in distinct}
    texts = _counted(alphabet, lengths, count)
    latest = texts
    for _ in range(_ROUNDS):
        wrong = _inexact(texts)
        if not wrong:
            break
        lengths = {plan: max(lengths[plan] + len(plan) - latest[plan].num_tokens, 1) for plan in wrong}
        latest = _counted(alphabet, lengths, count)
        texts |= {plan: _nearest(plan, (texts[plan], latest[plan])) for plan in wrong}
    return texts | _with_other_endings({plan: texts[plan] for plan in _inexact(texts)}, count)


def _num_added(alphabet: Alphabet, plans: Sequence[Plan], count: Count) -> int:
    """Tokens that the server adds to each text; ProfileError for plans that leave no room for them."""
    (num_probe_tokens,) = count([alphabet.text(_PROBE)])
    num_added = max(num_probe_tokens - len(_PROBE), 0)
    shortest = min(map(len, plans))
    if shortest <= num_added:
        raise ProfileError(
            f"a prompt is planned with {shortest} tokens, but the server adds {num_added} of its own to each "
            f"(chat template, beginning of text); plan at least {num_added + 1}, as in workload.input_len, or set "
            "workload.chat to false"
        )
    return num_added


def _counted(alphabet: Alphabet, lengths: dict[Plan, int], count: Count) -> dict[Plan, WrittenText]:
    """The beginning of each plan in pieces, or all of it and pieces that go on behind its end."""
    texts = [alphabet.text([*plan[:length], *range(len(plan), length)]) for plan, length in lengths.items()]
    counted = zip(texts, count(texts), strict=True)
    return {plan: WrittenText(*text) for plan, text in zip(lengths, counted, strict=True)}


def _inexact(texts: dict[Plan, WrittenText]) -> list[Plan]:
    return [plan for plan, text in texts.items() if text.num_tokens != len(plan)]


def _nearest(plan: Plan, texts: Iterable[WrittenText]) -> WrittenText:
    return min(texts, key=lambda text: abs(text.num_tokens - len(plan)))


def _with_other_endings(texts: dict[Plan, WrittenText], count: Count) -> dict[Plan, WrittenText]:
    """The texts, each with the ending of ``_ENDINGS`` that brings it nearest."""
    tried: dict[Plan, list[str]] = {
        plan: [stem + ending for stem in (text.text, text.text[:-1]) for ending in _ENDINGS]
        for plan, text in texts.items()
    }
    candidates = [text for variants in tried.values() for text in variants]
    if not candidates:
        return {}
    counted = dict(zip(candidates, count(candidates), strict=True))
    return {
        plan: _nearest(plan, [WrittenText(text, counted[text]) for text in variants])
        for plan, variants in tried.items()
    }
