"""Guided requests in a vLLM server: what they ask for, and the rows of both model runners that follow its batch."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.guided.slotted_worker import Worker, context
from support.guided.tensors import torch  # noqa: F401 - skips these tests where there is none

from benchctl.guided.params import GuidanceError
from benchctl.guided.vllm.requests import Batch, Rows, admit, guided_request
from benchctl.guided.vllm.settings import VllmSettings, settings_of
from benchctl.guided.vllm.slots import check_v2

TILT = {"lenvm_mode": "centered_exp", "lenvm_value_scale": -3.0}


@dataclass
class Asked:
    """The parameters of vLLM that matter here, with its defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    extra_args: dict[str, Any] | None = field(default_factory=dict)


def test_filters_of_a_guided_request_are_moved_to_where_they_are_applied_once():
    request = Asked(top_k=5, top_p=0.9, min_p=0.01, extra_args=TILT | {"session": "a"})
    admit(request, 64)
    once = replace(request, extra_args=dict(request.extra_args))
    admit(request, 64)
    assert request == once == Asked(extra_args=request.extra_args)
    assert request.extra_args["session"] == "a"
    row = guided_request(request)
    assert (row.top_k, row.top_p, row.min_p) == (5, 0.9, 0.01)
    assert (row.params.mode, row.params.value_scale) == ("centered_exp", -3.0)
    # They may be sent with the prefix as well, and go back where nothing is guided.
    for temperature in (1.0, 0.0):
        request = Asked(temperature=temperature, extra_args=TILT | {"lenvm_top_k": 7})
        admit(request, 64)
        row = guided_request(request)
        assert (row and row.top_k, request.top_k) == ((7, 0) if temperature else (None, 7))


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (TILT, {"temperature": 0.0, "top_k": 5}),
        (TILT, {"top_k": 1}),
        ({"lenvm_value_scale": 0.0, "lenvm_mode": "centered_exp"}, {"top_k": 5, "top_p": 0.5}),
        ({"lenvm_gamma": 0.99}, {"top_k": 5}),
        ({}, {"top_k": 5, "min_p": 0.1}),
        ({"mode": "nonsense", "value_scale": "of another plugin"}, {"top_p": 0.5}),
    ],
    ids=["greedy", "one-candidate", "neutral", "not-activated", "none", "keys-of-another"],
)
def test_a_request_that_guidance_never_touches_keeps_the_filters_of_the_server(extra, told):
    request = Asked(**told, extra_args=dict(extra))
    admit(request, 64)
    assert request == Asked(**told, extra_args=dict(extra))
    assert guided_request(request) is None


@pytest.mark.parametrize(
    ("told", "extra", "said"),
    [
        ({"top_k": 5}, {"lenvm_value_scale": "strong"}, "value_scale is 'strong'"),
        ({"top_k": 5}, {"lenvm_scal": 1.0}, "did you mean"),
        ({"top_k": 5}, {"lenvm_value_scale": float("nan")}, "finite"),
        ({}, TILT, "top_k is 0"),
        ({"top_k": -1}, TILT, "top_k is -1"),
        ({"top_k": 65}, TILT, "64 at most"),
        ({"top_k": 5, "temperature": 0.0}, {"lenvm_mode": "none"}, "mode is 'none'"),
        ({"top_k": 5, "top_p": 0.5}, TILT | {"lenvm_top_p": 0.9}, "one of the two"),
        ({"top_k": 5}, TILT | {"lenvm_min_p": 2}, "lenvm_min_p is 2"),
        ({}, TILT | {"lenvm_top_k": 2.5}, "whole number"),
        ({"top_k": 5}, TILT | {"lenvm_top_p": 0}, "lenvm_top_p is 0"),
    ],
)
def test_what_does_not_exist_is_refused_with_its_name(told, extra, said):
    request = Asked(**told, extra_args=dict(extra))
    with pytest.raises(GuidanceError, match=said):
        admit(request, 64)
    assert request == Asked(**told, extra_args=dict(extra))


def test_a_server_is_told_its_settings_in_one_variable_and_refuses_what_does_not_exist():
    assert settings_of({}) == VllmSettings()
    told = settings_of({"BENCHCTL_LENVM_SETTINGS": '{"fused": false, "memory_bytes": 5}'})
    assert told == VllmSettings(fused=False, memory_bytes=5)
    for text in ("no json", "[]", '{"fuse": true}', '{"fused": 1}', '{"max_candidates": true}'):
        with pytest.raises(GuidanceError, match="BENCHCTL_LENVM_SETTINGS"):
            settings_of({"BENCHCTL_LENVM_SETTINGS": text})


def asked(*, guided: bool = True, **told: Any) -> Asked:
    request = Asked(top_k=5, extra_args=dict(TILT) if guided else {}, **told)
    admit(request, 64)
    return request


@dataclass(eq=False)
class Living:
    """A request as the reference knows it, with the keys that its rows had."""

    prompt: list[int]
    is_guided: bool
    output: list[int] = field(default_factory=list)
    keys: set[int] = field(default_factory=set)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def added(self, index: int) -> tuple[int, Asked, list[int], list[int]]:
        """As vLLM's first runner tells of a request that it adds."""
        return index, asked(guided=self.is_guided), self.prompt, self.output


def told(batch: Batch | Rows) -> dict[int, list[int]]:
    return {row.index: list(row.tokens) for row in batch.in_order}


def assert_own_keys(entries: list[Living]) -> None:
    keys = [key for entry in entries for key in entry.keys]
    assert len(keys) == len(set(keys)) == sum(bool(entry.keys) for entry in entries)


def update(batch_size: int, *, removed: Any = (), added: Any = (), moved: Any = ()) -> SimpleNamespace:
    """What became of the batch of vLLM's first runner."""
    return SimpleNamespace(batch_size=batch_size, removed=removed, added=added, moved=moved)


SWAP, MOVE = SimpleNamespace(name="SWAP"), SimpleNamespace(name="UNIDIRECTIONAL")


@settings(max_examples=50)
@given(st.data())
def test_any_course_of_a_batch_leaves_each_row_with_the_tokens_of_its_request(data):
    rows, batch, everyone, serial = Rows(), dict[int, Living](), list[Living](), iter(range(10_000))
    for _ in range(data.draw(st.integers(1, 12))):
        before = [entry for entry in batch.values() if entry.is_guided]
        removed = sorted(data.draw(st.sets(st.sampled_from(sorted(batch)))) if batch else (), reverse=True)
        for index in removed:
            del batch[index]
        added = []
        for _ in range(data.draw(st.integers(0, 3))):
            index = next(i for i in range(100) if i not in batch)
            batch[index] = Living([next(serial) for _ in range(3)], data.draw(st.booleans()))
            added.append(batch[index].added(index))
            everyone.append(batch[index])
        gone = rows.update(update(len(batch), removed=removed, added=added, moved=_moves(data, batch)))
        for entry in batch.values():
            entry.output.append(next(serial))
        guided = {index: entry for index, entry in batch.items() if entry.is_guided}
        assert told(rows) == {index: entry.tokens for index, entry in guided.items()}
        assert bool(rows) == bool(guided)
        assert len(gone) == sum(entry not in guided.values() for entry in before)
        for row in rows.in_order:
            batch[row.index].keys.add(row.key)
    assert_own_keys(everyone)


def _moves(data: Any, batch: dict[int, Living]) -> list[tuple[int, int, SimpleNamespace]]:
    """Swaps, then the last rows into empty places, as vLLM condenses its batch."""
    moves = []
    for _ in range(data.draw(st.integers(0, 2)) if len(batch) > 1 else 0):
        one, other = data.draw(st.permutations(sorted(batch)))[:2]
        batch[one], batch[other] = batch[other], batch[one]
        moves.append((one, other, SWAP))
    while batch and max(batch) >= len(batch):
        last, empty = max(batch), next(i for i in range(100) if i not in batch)
        batch[empty] = batch.pop(last)
        moves.append((last, empty, MOVE))
    return moves


def test_a_row_that_takes_the_place_of_another_ends_it_and_one_without_tokens_is_filtered_and_not_guided():
    rows = Rows()
    assert rows.update(update(1, added=[Living([1], is_guided=True).added(0)])) == []
    old = rows.in_order[0].key
    assert rows.update(update(1, added=[Living([2], is_guided=True).added(0)])) == [old]
    assert told(rows) == {0: [2]}
    assert len(rows.update(update(1, added=[(0, asked(), None, [])]))) == 1
    (row,) = rows.in_order
    assert (row.params.is_neutral, row.params.skip_noop, row.top_k, row.draws_candidates) == (True, True, 5, True)
    assert len(rows.update(update(0, removed=[0]))) == 1
    assert rows.batch_size == 0


@settings(max_examples=50)
@given(st.data())
def test_any_course_of_the_slots_of_the_second_runner_leaves_each_row_with_the_tokens_of_its_request(data):
    worker, serial = Worker(), iter(range(10_000))
    living: dict[int, Living] = {}
    waiting: list[Living] = []
    for _ in range(data.draw(st.integers(1, 14))):
        for slot in data.draw(st.sets(st.sampled_from(sorted(living)))) if living else ():
            gone = living.pop(slot)
            worker.remove(slot)
            if gone.output and data.draw(st.booleans()):  # preempted: it comes back, with what it had
                waiting.append(gone)
        for _ in range(data.draw(st.integers(0, 4 - len(living)))):
            new = Living([next(serial) for _ in range(data.draw(st.integers(1, 6)))], data.draw(st.booleans()))
            entry = waiting.pop() if waiting and data.draw(st.booleans()) else new
            slot = worker.add(asked(guided=entry.is_guided), entry.prompt, entry.output)
            living[slot] = entry
            entry.keys = set()
        order = data.draw(st.permutations(sorted(living)))[: data.draw(st.integers(0, len(living)))]
        if not order:
            continue
        drawn = {slot: next(serial) for slot in order}
        batch = worker.step(order, drawn, chunk=data.draw(st.sampled_from([2, 1000])))
        complete = {slot for slot in order if worker.computed[slot] == len(living[slot].tokens)}
        expected = {i: living[slot] for i, slot in enumerate(order) if slot in complete and living[slot].is_guided}
        assert told(batch) == {index: entry.tokens for index, entry in expected.items()}
        assert batch.batch_size == len(order)
        for row in batch.in_order:
            assert row.num_prompt == len(expected[row.index].prompt)
            expected[row.index].keys.add(row.key)
        for slot in complete:
            living[slot].output.append(drawn[slot])
    assert_own_keys(list(living.values()))


def test_rows_have_the_tokens_up_to_their_place_whenever_these_were_asked_for():
    worker = Worker()
    slot = worker.add(asked(), [1, 2, 3, 4, 5])
    # A prompt in chunks is not guided until its last one, and a stride does not count the others.
    assert [len(worker.step([slot], {slot: 7}, chunk=2).in_order) for _ in range(3)] == [0, 0, 1]
    (row,) = worker.step([slot], {slot: 8}).in_order
    assert len(row.tokens) - row.num_prompt == 1
    # A sequence that is computed again from an earlier place has only the tokens up to there.
    assert told(worker.slots.batch(context([slot], [5]))) == {0: [1, 2, 3, 4, 5]}
    worker.slots.ask_for_tokens()
    assert told(worker.slots.batch(context([slot], [6]))) == {0: [1, 2, 3, 4, 5, 7]}
    # Tokens that nobody had asked for in time are brought, and none behind a slot that is full.
    full = Worker(longest=4)
    slot = full.add(asked(), [1, 2, 3])
    assert told(full.slots.batch(context([slot], [3]))) == {0: [1, 2, 3]}
    full.step([slot], {slot: 4})
    full.slots.ask_for_tokens()
    assert told(full.slots.batch(full.forward([slot]))) == {0: [1, 2, 3, 4]}
    full.slots.ask_for_tokens()


def test_what_guidance_cannot_follow_on_v2_is_refused():
    worker = Worker()
    slot = worker.add(asked(), [1])
    with pytest.raises(GuidanceError, match="2 rows for 1 requests"):
        worker.slots.batch(context([slot], [1], rows_per_request=2))
    for speculative, embeds, said in (
        ("eagle", False, "without --speculative-config"),
        (None, True, "without --enable-prompt-embeds"),
    ):
        model = SimpleNamespace(enable_prompt_embeds=embeds)
        with pytest.raises(GuidanceError, match=said):
            check_v2(SimpleNamespace(speculative_config=speculative, model_config=model))
