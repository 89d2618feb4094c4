"""The guided rows of Model Runner V2: whose they are, what tokens they have, and what becomes of their logits."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guided.slotted_worker import Worker, context, states
from support.guided.tensors import torch
from support.guided.value_models import write_pair
from test_guided_device import noted_reads
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


def test_rows_have_the_tokens_up_to_their_place_whenever_these_were_asked_for():
    worker_ = worker()
    slot, _ = worker_.add(asked(), [1, 2, 3, 4, 5])
    # A prompt in chunks is not guided until its last one, and a stride does not count the others.
    assert [len(worker_.step([slot], {slot: 7}, chunk=2).in_order) for _ in range(3)] == [0, 0, 1]
    (row,) = worker_.step([slot], {slot: 8}).in_order
    assert len(row.tokens) - row.num_prompt == 1
    # A sequence that is computed again from an earlier place has only the tokens up to there.
    assert told(worker_.slots.batch(context([slot], [5]))) == {0: [1, 2, 3, 4, 5]}
    worker_.slots.ask_for_tokens()
    assert told(worker_.slots.batch(context([slot], [6]))) == {0: [1, 2, 3, 4, 5, 7]}
    # Tokens that nobody had asked for in time are brought, and none behind a slot that is full.
    full = worker(longest=4)
    slot, _ = full.add(asked(), [1, 2, 3])
    assert told(full.slots.batch(context([slot], [3]))) == {0: [1, 2, 3]}
    full.step([slot], {slot: 4})
    full.slots.ask_for_tokens()
    assert told(full.slots.batch(full.forward([slot]))) == {0: [1, 2, 3, 4]}
    full.slots.ask_for_tokens()


def test_what_guidance_cannot_follow_on_v2_is_refused():
    worker_ = worker()
    slot, _ = worker_.add(asked(), [1])
    with pytest.raises(GuidanceError, match="2 rows for 1 requests"):
        worker_.slots.batch(context([slot], [1], rows_per_request=2))
    for speculative, embeds, said in (
        ("eagle", False, "without --speculative-config"),
        (None, True, "without --enable-prompt-embeds"),
    ):
        model = SimpleNamespace(enable_prompt_embeds=embeds)
        with pytest.raises(GuidanceError, match=said):
            check_v2(SimpleNamespace(speculative_config=speculative, model_config=model))
    check_v2(SimpleNamespace(speculative_config=None, model_config=SimpleNamespace(enable_prompt_embeds=False)))


def test_the_tokens_of_all_requests_are_asked_for_before_the_model_and_read_at_once_after_it(monkeypatch):
    worker_ = worker(slots=8)
    order = [worker_.add(asked(guided=number != 2), [number] * (number + 1))[0] for number in range(6)]
    worker_.step(order, dict.fromkeys(order, 7))
    said, reads = worker_.forward(order), noted_reads(monkeypatch)
    worker_.slots.ask_for_tokens()
    assert reads == []
    rows = worker_.slots.batch(said).in_order
    assert reads == ["tolist"]
    assert [row.tokens[-1] for row in rows] == [7] * 5


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


def test_what_is_drawn_after_the_temperature_of_the_server_is_what_the_other_runner_draws(server):
    scales, logits = (-4.0, 0.0, 3.0), batch_logits(3)
    for temperature in (0.3, 1.0, 1.9):
        filters = {"top_k": 6, "top_p": 0.97, "min_p": 0.01, "temperature": temperature}
        after = guided_by_v2(server, [tilted(scale, **filters) for scale in scales], logits)
        rows = rows_of(*(tilted(scale, **filters) for scale in scales))
        drawn = probabilities(after / temperature)
        expected = probabilities(server.apply(logits / temperature, rows, 0))
        assert torch.equal(drawn > 0, expected > 0)
        assert torch.allclose(drawn, expected, atol=1e-6)
        assert (drawn[0] - drawn[1]).abs().max() > 0.05, "guidance did nothing"


def test_rows_of_other_requests_and_of_prompts_in_chunks_keep_every_bit(server):
    logits = batch_logits(4)
    others = [Asked(top_k=3, temperature=0.5), tilted(0.0, temperature=0.0), Asked()]
    guided = guided_by_v2(server, [tilted(-5.0, temperature=0.5), *others], logits)
    assert torch.equal(guided[1:], logits[1:])
    assert not torch.equal(guided[0], logits[0])
    assert torch.equal(guided_by_v2(server, [tilted(-5.0), Asked()], logits[:2], chunk=2), logits[:2])


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
