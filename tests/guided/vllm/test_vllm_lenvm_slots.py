"""The guided rows of Model Runner V2: whose they are, what tokens they have, and what becomes of their logits."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guided.slotted_worker import Worker, context, states
from support.guided.tensors import torch
from support.guided.value_models import write_pair
from test_guided_no_waiting import Ops, reads_of_one_step
from test_vllm_lenvm_requests import TILT, Asked
from test_vllm_lenvm_server import CPU, EOS, VOCABULARY, batch_logits, config, probabilities, rows_of, tilted

from benchctl.guided.params import GuidanceError
from benchctl.guided.vllm.requests import admit
from benchctl.guided.vllm.server import make_server
from benchctl.guided.vllm.settings import VllmSettings
from benchctl.guided.vllm.slots import check_v2
from benchctl.guided.vllm.steps import StepCount


def asked(*, guided=True, **told):
    request = Asked(top_k=5, extra_args=dict(TILT) if guided else {}, **told)
    admit(request, 64)
    return request


def worker(slots=4, longest=64):
    return Worker(states(slots, longest))


def told(batch):
    return {row.index: list(row.tokens) for row in batch.in_order}


@dataclass
class Living:
    """A request as the reference knows it."""

    prompt: list[int]
    is_guided: bool
    output: list[int] = field(default_factory=list)
    keys: set[int] = field(default_factory=set)

    @property
    def tokens(self):
        return self.prompt + self.output


@given(st.data())
def test_any_course_of_a_batch_leaves_each_row_with_the_tokens_of_its_request(data):
    worker_, serial = worker(), iter(range(10_000))
    living: dict[int, Living] = {}
    waiting: list[Living] = []
    for _ in range(data.draw(st.integers(1, 14))):
        for slot in data.draw(st.sets(st.sampled_from(sorted(living)))) if living else ():
            gone = living.pop(slot)
            worker_.remove(slot)
            if gone.output and data.draw(st.booleans()):  # preempted: it comes back, with what it had
                waiting.append(gone)
        for _ in range(data.draw(st.integers(0, 4 - len(living)))):
            new = Living([next(serial) for _ in range(data.draw(st.integers(1, 6)))], data.draw(st.booleans()))
            entry = waiting.pop() if waiting and data.draw(st.booleans()) else new
            slot, _ = worker_.add(asked(guided=entry.is_guided), entry.prompt, entry.output)
            living[slot] = entry
            entry.keys = set()
        order = data.draw(st.permutations(sorted(living)))[: data.draw(st.integers(0, len(living)))]
        if not order:
            continue
        drawn = {slot: next(serial) for slot in order}
        batch = worker_.step(order, drawn, chunk=data.draw(st.sampled_from([2, 1000])))
        complete = {slot for slot in order if worker_.computed[slot] == len(living[slot].tokens)}
        expected = {i: living[slot] for i, slot in enumerate(order) if slot in complete and living[slot].is_guided}
        assert told(batch) == {index: entry.tokens for index, entry in expected.items()}
        assert batch.batch_size == len(order)
        for row in batch.in_order:
            assert row.num_prompt == len(expected[row.index].prompt)
            expected[row.index].keys.add(row.key)
        for slot in complete:
            living[slot].output.append(drawn[slot])
    keys = [key for entry in living.values() for key in entry.keys]
    assert len(keys) == len(set(keys)) == sum(bool(entry.keys) for entry in living.values())


def test_a_slot_that_is_taken_again_belongs_to_the_new_request_alone():
    worker_ = worker(slots=1)
    slot, gone = worker_.add(asked(), [1, 2])
    assert gone is None
    (first,) = worker_.step([slot], {slot: 3}).in_order
    worker_.step([slot], {slot: 4})
    worker_.remove(slot)
    assert worker_.add(asked(), [9])[1] == first.key
    (second,) = worker_.step([slot], {slot: 5}).in_order
    assert (list(second.tokens), second.num_prompt) == ([9], 1)
    assert second.key != first.key
    worker_.remove(slot)
    assert worker_.add(asked(guided=False), [8])[1] == second.key
    assert not worker_.slots
    assert worker_.step([slot], {slot: 6}).in_order == []


def test_a_prompt_in_chunks_is_not_guided_until_its_last_chunk_and_a_stride_does_not_count_the_others():
    worker_ = worker()
    slot, _ = worker_.add(asked(), [1, 2, 3, 4, 5])
    assert [len(worker_.step([slot], {slot: 7}, chunk=2).in_order) for _ in range(3)] == [0, 0, 1]
    (row,) = worker_.step([slot], {slot: 7}).in_order
    assert len(row.tokens) - row.num_prompt == 1


def test_a_preempted_request_comes_back_with_its_prompt_and_output_apart():
    worker_ = worker()
    slot, _ = worker_.add(asked(), [1, 2, 3], output=[4, 5])
    (row,) = worker_.step([slot], {slot: 6}).in_order
    assert (list(row.tokens), row.num_prompt) == ([1, 2, 3, 4, 5], 3)


def test_a_sequence_that_fills_its_slot_asks_for_no_token_behind_it():
    worker_ = worker(longest=4)
    slot, _ = worker_.add(asked(), [1, 2, 3])
    worker_.step([slot], {slot: 4})
    worker_.slots.ask_for_tokens()
    (row,) = worker_.slots.batch(worker_.forward([slot])).in_order
    assert list(row.tokens) == [1, 2, 3, 4]
    worker_.slots.ask_for_tokens()


def test_tokens_that_nobody_had_asked_for_in_time_are_brought_when_they_are_wanted():
    worker_ = worker()
    slot, _ = worker_.add(asked(), [1, 2, 3])
    assert told(worker_.slots.batch(context([slot], [3]))) == {0: [1, 2, 3]}


def test_a_sequence_that_is_computed_again_from_an_earlier_place_has_only_the_tokens_up_to_there():
    worker_ = worker()
    slot, _ = worker_.add(asked(), [1, 2])
    worker_.step([slot], {slot: 3})
    worker_.step([slot], {slot: 4})
    assert told(worker_.slots.batch(context([slot], [2]))) == {0: [1, 2]}
    worker_.slots.ask_for_tokens()
    assert told(worker_.slots.batch(context([slot], [3]))) == {0: [1, 2, 3]}


class Gathers(Ops):
    """Notes each gather of tokens."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith(("aten.index.", "aten.index_select", "aten.gather")):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_the_tokens_of_all_requests_come_in_one_copy_that_is_asked_for_before_the_model_and_read_after_it():
    worker_ = worker(slots=8)
    order = [worker_.add(asked(guided=number != 2), [number] * (number + 1))[0] for number in range(6)]
    for step in range(4):
        with Gathers() as gathers:
            assert reads_of_one_step(iter([worker_.slots.ask_for_tokens()])) == []
        assert len(gathers.seen) == 1
        said = worker_.forward(order)

        def take(said=said):
            yield worker_.slots.batch(said)

        with Gathers() as gathers:
            assert reads_of_one_step(take()) == ["tolist"]
        assert gathers.seen == []
        for slot in order:
            worker_.states.all_token_ids.gpu[slot, worker_.computed[slot]] = step
            worker_.states.total_len.gpu[slot] += 1
    worker_.slots.ask_for_tokens()
    rows = worker_.slots.batch(worker_.forward(order)).in_order
    assert [row.tokens[-4:] for row in rows] == [[0, 1, 2, 3]] * 5


def test_to_ask_for_tokens_reads_nothing_of_the_device():
    """The device is torch's ``meta``: it has no numbers that could be read."""
    worker_ = Worker(states(4, 64, "meta"))
    slot = 3
    worker_.states.prompt_len.np[slot] = worker_.states.prefill_len.np[slot] = 2
    worker_.slots.add(slot, asked())
    worker_.slots.ask_for_tokens()
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        worker_.slots.batch(context([slot], [2]))


def test_several_rows_of_one_request_are_refused():
    worker_ = worker()
    slot, _ = worker_.add(asked(), [1])
    with pytest.raises(GuidanceError, match="2 rows for 1 requests"):
        worker_.slots.batch(context([slot], [1], rows_per_request=2))


@pytest.mark.parametrize(
    ("speculates", "embeds", "said"),
    [(True, False, "without --speculative-config"), (False, True, "without --enable-prompt-embeds")],
)
def test_what_guidance_cannot_follow_on_v2_is_refused_at_the_start(speculates, embeds, said):
    model = SimpleNamespace(enable_prompt_embeds=embeds)
    with pytest.raises(GuidanceError, match=said):
        check_v2(SimpleNamespace(speculative_config="eagle" if speculates else None, model_config=model))
    check_v2(SimpleNamespace(speculative_config=None, model_config=SimpleNamespace(enable_prompt_embeds=False)))


# What becomes of the logits.


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory):
    pair = write_pair(tmp_path_factory.mktemp("pair"))  # values differ from place to place
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCHCTL_LENVM_MODEL", str(pair / "value"))
        return make_server(config(max_num_seqs=8), CPU, VllmSettings(), is_v2=True)


def guided_by_v2(server, requests, logits, chunk=1000):
    """Logits of the first step of these requests, their prompts as in ``rows_of``."""
    worker_ = worker(slots=8)
    order = []
    for number, request in enumerate(requests):
        admit(request, 64)
        order.append(worker_.add(request, [5, 6, 7 + number], output=[9])[0])
    worker_.slots.ask_for_tokens()
    batch = worker_.slots.batch(worker_.forward(order, chunk))
    return server.apply(logits.clone(), batch, 0)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.9])
def test_what_is_drawn_after_the_temperature_of_the_server_is_what_the_other_runner_draws(server, temperature):
    filters = {"top_k": 6, "top_p": 0.97, "min_p": 0.01, "temperature": temperature}
    scales, logits = (-4.0, 0.0, 3.0), batch_logits(3)
    after = guided_by_v2(server, [tilted(scale, **filters) for scale in scales], logits)
    before = server.apply(logits / temperature, rows_of(*(tilted(scale, **filters) for scale in scales)), 0)
    drawn, expected = probabilities(after / temperature), probabilities(before)
    assert torch.equal(drawn > 0, expected > 0)
    assert torch.allclose(drawn, expected, atol=1e-6)
    assert (drawn[0] - drawn[1]).abs().max() > 0.05, "guidance did nothing"


def test_rows_of_other_requests_keep_every_bit(server):
    logits = batch_logits(4)
    requests = [
        Asked(top_k=3, temperature=0.5),
        tilted(-5.0, temperature=0.5),
        tilted(0.0, temperature=0.0),
        Asked(),
    ]
    guided = guided_by_v2(server, requests, logits)
    assert torch.equal(guided[[0, 2, 3]], logits[[0, 2, 3]])
    assert not torch.equal(guided[1], logits[1])


def test_rows_of_a_prompt_in_chunks_keep_every_bit(server):
    logits = batch_logits(2)
    batch = guided_by_v2(server, [tilted(-5.0), Asked()], logits, chunk=2)
    assert torch.equal(batch, logits)


def test_tokens_that_a_grammar_has_masked_stay_masked(server):
    logits = torch.full((2, VOCABULARY), -torch.inf)
    logits[:, EOS], logits[:, 40] = 1.0, 1.5
    guided = guided_by_v2(server, [tilted(-5.0, temperature=0.8), tilted(5.0, temperature=0.8)], logits)
    assert torch.equal(guided > -torch.inf, logits > -torch.inf)
    drawn = probabilities(guided / 0.8)
    assert drawn[0, EOS] > probabilities(logits / 0.8)[0, EOS] > drawn[1, EOS] > 0


# The numbers of steps.


def test_steps_are_counted_from_the_end_of_the_warm_up():
    class Sampler:
        def __call__(self, seen):
            seen.append(count.number)
            return "drawn"

    class Worker:
        def compile_or_warm_up_model(self):
            sampler([])
            sampler([])
            return "warm"

    count, seen = StepCount(), []
    count.watch(Sampler, Worker)
    sampler = Sampler()
    assert Worker().compile_or_warm_up_model() == "warm"
    assert [sampler(seen) for _ in range(3)] == ["drawn"] * 3
    assert seen == [0, 1, 2]
