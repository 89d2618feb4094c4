"""What the warm-up sends: every shape of the load, nothing that the load will ask again."""

import itertools

import msgspec
from hypothesis import given, strategies as st
from support.servers.paced_engine import request

from benchctl.measure.warmup import batch_sizes, drain_lengths, shape_bursts, warmup_bursts
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.records.record import Message
from benchctl.workload.prepare import prepare_requests


def bursts_of(*overrides, engine=None):
    chosen = load_profile("topk-sweep", engine=engine, overrides=overrides)
    requests = prepare_requests(chosen).requests
    return requests, warmup_bursts(requests, chosen, variant_settings(chosen, "baseline", {}))


def sizes_passed(lengths):
    """Batch sizes of a burst with these output lengths, all of which begin together."""
    return {sum(length > step for length in lengths) for step in range(max(lengths))}


def test_the_simulator_is_warmed_up_by_its_few_requests_alone():
    requests, bursts = bursts_of("workload.num_warmups=2")
    assert [[r.request_id for r in burst] for burst in bursts] == [["warmup-0", "warmup-1"]]
    assert bursts[0][0].messages[-1].content == f"(warm-up 0) {requests[0].messages[-1].content}"
    assert (bursts[0][0].n, bursts[0][0].max_tokens, bursts[0][0].ignore_eos) == (4, 16, True)


def test_a_server_that_others_wrote_meets_every_batch_size_and_the_extreme_prompts():
    requests, bursts = bursts_of(engine="vllm")
    few, longest, shortest, drain = bursts
    lengths = sorted(r.prompt_tokens for r in requests)
    assert len(few) == 1
    assert [[r.prompt_tokens for r in burst] for burst in (longest, shortest)] == [lengths[-1:], lengths[:1]]
    assert {lengths[0], lengths[-1]} <= {r.prompt_tokens for r in drain}
    assert (len(drain), sizes_passed([r.max_tokens for r in drain])) == (12, set(range(1, 13)))
    assert max(drain, key=lambda r: r.prompt_tokens).max_tokens == min(r.max_tokens for r in drain)


def test_the_warm_up_has_the_largest_batch_of_the_load_and_requests_as_the_load_asks_them():
    for overrides, size in (
        (("workload.arrival={kind: burst, max_concurrency: null}",), 48),
        (("workload.arrival.max_concurrency=5",), 5),
        (("engine.options.max_num_seqs=7",), 7),
        (("workload.samples_as=one-request",), 48),
        (("workload.num_prompts=2", "workload.samples_per_prompt=1"), 2),
    ):
        assert len(bursts_of(*overrides, engine="vllm")[1][-1]) == size, overrides
    _, bursts = bursts_of("workload.samples_as=one-request", engine="vllm")
    assert [sorted({r.n for r in burst}) for burst in bursts] == [[4], [1], [1], [4], [1]]


def test_a_profile_may_leave_the_shapes_out_or_ask_for_them_on_any_server():
    for overrides, engine, num_bursts in (
        (("workload.warmup_shapes=false",), "vllm", 1),
        (("workload.num_warmups=0",), "vllm", 0),
        (("workload.warmup_shapes=true", "workload.num_warmups=0"), None, 4),
    ):
        assert len(bursts_of(*overrides, engine=engine)[1]) == num_bursts, overrides


def test_no_prompt_of_the_warm_up_begins_like_another_or_like_one_of_the_load():
    requests, bursts = bursts_of(engine="vllm")
    shapes = [r for burst in bursts[1:] for r in burst]
    begins = [message.content[:8] for r in shapes for message in r.messages[-1:]]
    assert len(set(begins)) == len(begins)
    assert not {message.content[:8] for r in requests for message in r.messages} & set(begins)
    assert len({r.request_id for burst in bursts for r in burst}) == sum(map(len, bursts))


@given(size=st.integers(1, 600), whole=st.integers(1, 60), limit=st.integers(1, 400))
def test_lengths_of_the_drain_never_pass_the_limit_and_visit_the_sizes_where_there_is_room(size, whole, limit):
    lengths = drain_lengths(size, whole_steps=whole, limit=limit)
    assert len(lengths) == size
    assert list(lengths) == sorted(lengths)
    assert 1 <= lengths[0] <= lengths[-1] <= limit
    if limit >= len(batch_sizes(size)):
        assert sizes_passed(lengths) == set(batch_sizes(size))


@given(largest=st.integers(1, 2000))
def test_sizes_are_those_that_engines_capture_and_the_largest(largest):
    sizes = batch_sizes(largest)
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert all(a < b <= a + 16 for a, b in itertools.pairwise(sizes))
    assert set(range(1, min(largest, 33))) <= set(sizes)


def test_a_text_prompt_and_every_message_are_reworded():
    asked = request(0, max_tokens=3)
    bursts = shape_bursts([msgspec.structs.replace(asked, prompt="Once")], 1, 2048)
    assert len({r.prompt[:8] for (r,) in bursts}) == 3
    assert all(r.prompt.endswith(" Once") and r.max_tokens <= 3 for (r,) in bursts)
    messages = (Message(role="system", content="Be kind."), Message(role="user", content="Hi"))
    (first,), *_ = shape_bursts([msgspec.structs.replace(asked, prompt=None, messages=messages)], 1, 2048)
    assert [m.content.partition(" ")[2] for m in first.messages] == ["Be kind.", "Hi"]
