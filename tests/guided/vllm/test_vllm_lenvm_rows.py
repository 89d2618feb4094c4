"""The guided rows of vLLM's batch follow every change that vLLM tells of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.guided.tensors import torch  # noqa: F401 - skips these tests where there is none
from test_vllm_lenvm_requests import TILT, Asked

from benchctl.guided.vllm.requests import Rows, admit


class Direction(Enum):
    """As vLLM names what became of the two places of a move."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass
class Update:
    batch_size: int
    removed: Sequence[int] = ()
    added: Sequence[tuple[int, Any, list[int] | None, list[int]]] = ()
    moved: Sequence[tuple[int, int, Direction]] = ()


@dataclass
class Sequenced:
    """A request as the reference knows it."""

    asked: Asked
    prompt: list[int]
    is_guided: bool
    output: list[int] = field(default_factory=list)


def request(*, guided: bool, prompt: list[int]) -> Sequenced:
    asked = Asked(top_k=5, extra_args=dict(TILT) if guided else {})
    admit(asked, 64)
    return Sequenced(asked, prompt, guided)


def told(rows: Rows) -> dict[int, list[int]]:
    return {row.index: list(row.tokens) for row in rows.in_order}


@given(st.data())
def test_any_course_of_a_batch_leaves_each_row_with_the_tokens_of_its_request(data):
    rows, batch, serial = Rows(), dict[int, Sequenced](), iter(range(10_000))
    keys: dict[int, object] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        before = {id(entry) for entry in batch.values() if entry.is_guided}
        removed = sorted(data.draw(st.sets(st.sampled_from(sorted(batch)))) if batch else (), reverse=True)
        for index in removed:
            del batch[index]
        added = []
        for _ in range(data.draw(st.integers(0, 3))):
            index = next(i for i in range(100) if i not in batch)
            batch[index] = request(guided=data.draw(st.booleans()), prompt=[next(serial) for _ in range(3)])
            added.append((index, batch[index].asked, batch[index].prompt, batch[index].output))
        moved = _moves(data, batch)
        gone = rows.update(Update(len(batch), removed, added, moved))
        for entry in batch.values():
            entry.output.append(next(serial))
        guided = {index: entry for index, entry in batch.items() if entry.is_guided}
        assert told(rows) == {index: entry.prompt + entry.output for index, entry in guided.items()}
        assert bool(rows) == bool(guided)
        assert len(gone) == len(before - {id(entry) for entry in guided.values()})
        for row in rows.in_order:
            owner = id(batch[row.index])
            assert keys.setdefault(owner, row.key) == row.key
        assert len({row.key for row in rows.in_order}) == len(guided)
        _kept.append(list(batch.values()))  # ids are those of living objects
    _kept.clear()


_kept: list[list[Sequenced]] = []


def _moves(data: Any, batch: dict[int, Sequenced]) -> list[tuple[int, int, Direction]]:
    """Swaps, then the last rows into empty places, as vLLM condenses its batch."""
    moves = []
    for _ in range(data.draw(st.integers(0, 2)) if len(batch) > 1 else 0):
        one, other = data.draw(st.permutations(sorted(batch)))[:2]
        batch[one], batch[other] = batch[other], batch[one]
        moves.append((one, other, Direction.SWAP))
    while batch and max(batch) >= len(batch):
        last, empty = max(batch), next(i for i in range(100) if i not in batch)
        batch[empty] = batch.pop(last)
        moves.append((last, empty, Direction.UNIDIRECTIONAL))
    return moves


def test_a_row_that_takes_the_place_of_another_ends_it():
    rows = Rows()
    first, second = (request(guided=True, prompt=[number]) for number in (1, 2))
    assert rows.update(Update(1, added=[(0, first.asked, first.prompt, first.output)])) == []
    old = rows.in_order[0].key
    assert rows.update(Update(1, added=[(0, second.asked, second.prompt, second.output)])) == [old]
    assert told(rows) == {0: [2]}
    assert rows.update(Update(0, removed=[0])) == [1]
    assert rows.batch_size == 0


def test_filters_are_applied_without_guidance_where_a_prompt_has_no_tokens():
    rows, asked = Rows(), request(guided=True, prompt=[]).asked
    rows.update(Update(1, added=[(0, asked, None, [])]))
    (row,) = rows.in_order
    assert row.params.is_neutral
    assert row.params.skip_noop
    assert (row.top_k, row.draws_candidates) == (5, True)
