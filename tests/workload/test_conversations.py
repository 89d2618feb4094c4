"""Conversations: their turns in the request set, what is sent of them, and the profiles that cannot have any."""

import json
from itertools import pairwise

import pytest
from support.prepared import prepare, profile_of

from benchctl.errors import DatasetError, UsageError
from benchctl.profile.load import load_profile
from benchctl.records.record import Call
from benchctl.workload.prepare import prepare_requests
from benchctl.workload.tokenizers import count_chat_tokens
from benchctl.workload.turns import grouped, thinks_before, with_answers, with_answers_in

TURNS = {"number": 3, "think_s": 2.0, "think_cv": 1.0}
WRITTEN = {"dataset": "synthetic", "input_len": 40, "output_len": 20, "num_prompts": 6, "turns": TURNS}


def conversations(**changes):
    """The requests of each conversation of a written set."""
    prepared = prepare(WRITTEN | changes, stop="forced")
    by_session = {}
    for one in prepared.requests:
        by_session.setdefault(one.session, []).append(one)
    return list(by_session.values())


def test_each_turn_is_the_chat_before_it_an_answer_and_what_the_user_says_next():
    for conversation in conversations():
        assert [one.turn for one in conversation] == [0, 1, 2]
        assert len({one.arrival_ns for one in conversation}) == 1
        for before, after in pairwise(conversation):
            answer, said = after.messages[-2:]
            assert after.messages[:-2] == before.messages
            assert (answer.role, answer.content, said.role) == ("assistant", "", "user")
            assert after.index == before.index + 1
            assert after.shared_tokens == before.prompt_tokens + before.max_tokens
        for one in conversation:
            # the request set counts answers with their limit, the most that the server can say
            said_tokens = count_chat_tokens(one.messages)
            assert one.prompt_tokens == said_tokens + 20 * one.turn


def test_more_conversations_extend_the_same_sequence_and_think_times_have_their_mean():
    few, many = conversations(num_prompts=3), conversations(num_prompts=40)
    assert [[one.messages for one in each] for each in many[:3]] == [[one.messages for one in each] for each in few]
    thinks = [one.think_ns for each in many for one in each[1:]]
    assert [one.think_ns for each in few for one in each[1:]] == thinks[: len(few) * 2]
    assert 1.6e9 < sum(thinks) / len(thinks) < 2.4e9
    assert len(set(thinks)) == len(thinks)
    assert {each[0].think_ns for each in many} == {0}
    assert sum(len(each) for each in many) == len(thinks_before([one for each in many for one in each])) + len(many)


def test_arrivals_of_an_open_loop_are_those_of_conversations():
    arrival = {"kind": "poisson", "request_rate": 4.0}
    arrivals = [each[0].arrival_ns for each in conversations(arrival=arrival, num_prompts=200)]
    assert arrivals == sorted(arrivals)
    assert 35 < arrivals[-1] / 1e9 < 70  # 200 conversations at 4 per second, not 600 requests


def test_a_conversation_ends_before_the_turn_that_would_be_too_long():
    shorter = conversations(turns={"number": [1, 4], "max_tokens": 130})
    # prompts of 40, 102 and 164 tokens, and an answer of 20 behind each
    assert [len(each) for each in shorter] == [1, 2] * 3


def test_a_set_without_conversations_has_the_bytes_that_it_always_had():
    plain = {"dataset": "synthetic", "input_len": 40, "output_len": 20}
    assert prepare(plain, stop="forced").sha256.startswith("2f92698028269a3d")
    builtin = {name: prepare_requests(load_profile(name)) for name in ("ci-smoke", "flag", "rate-limited")}
    assert {name: prepared.sha256[:16] for name, prepared in builtin.items()} == {
        "ci-smoke": "8beea997b0ff70c7",
        "flag": "c613e5e3a90cf39d",
        "rate-limited": "5ba224a15d2a6b42",
    }


def row(*turns, speakers=("human", "gpt")):
    return {"conversations": [{"from": speakers[i % 2], "value": text} for i, text in enumerate(turns)]}


ASKED, ANSWERED = "Tell me a story please", "Once upon a time there was"


@pytest.fixture(name="shared")
def _shared(tmp_path):
    """Prepares conversations of rows as ShareGPT has them."""

    def read(*rows, num_prompts=1, **turns):
        path = tmp_path / "s.json"
        path.write_text(json.dumps(rows))
        workload = {"dataset": "sharegpt", "path": str(path), "num_prompts": num_prompts, "turns": turns}
        return prepare(workload, stop="forced").requests

    return read


def test_turns_of_sharegpt_are_pairs_of_a_human_and_the_model_from_the_first_on(shared):
    texts = [f"{text} {i}" for i in range(4) for text in (ASKED, ANSWERED)]
    whole, cut = row(*texts), row(*texts[:4], "No", ANSWERED, *texts[4:])
    odd = {"conversations": [*row(*texts[:5])["conversations"], {"from": "system", "value": ANSWERED}]}
    single = row(*texts[:2])
    requests = shared(single, whole, cut, odd, num_prompts=3, number=3)
    assert [one.request_id for one in requests] == [
        *(f"sharegpt-00001-t0{turn}" for turn in range(3)),
        *(f"sharegpt-00002-t0{turn}" for turn in range(2)),
        *(f"sharegpt-00003-t0{turn}" for turn in range(2)),
    ]
    assert [message.content for message in requests[2].messages] == [texts[0], "", texts[2], "", texts[4]]
    assert {one.max_tokens for one in requests} == {8}  # as many as the recorded answers
    with pytest.raises(DatasetError, match="has only 3"):
        shared(single, whole, cut, odd, num_prompts=4, number=3)


def test_recorded_answers_stand_in_later_prompts_and_are_no_tokens_of_the_cache(shared):
    texts = [f"{text} {i}" for i in range(3) for text in (ASKED, ANSWERED)]
    first, second, third = shared(row(*texts), answers="recorded")
    assert [message.content for message in third.messages] == texts[:5]
    assert third.prompt_tokens == count_chat_tokens(third.messages)
    assert (first.shared_tokens, second.shared_tokens) == (0, first.prompt_tokens)


@pytest.mark.parametrize("said", ['with "quotes" and \\ and \n', "emoji \U0001f600 and ideograph 語", "", "{}"])
def test_the_next_prompt_has_what_the_server_said_in_place_of_its_marks(said):
    (conversation,) = conversations(num_prompts=1)
    marked = with_answers_in(conversation[2])
    mark = marked.messages[1].content
    body = json.dumps({"messages": [[message.role, message.content] for message in marked.messages]}).encode()
    call = Call(request=marked, path="/", headers={}, body=body)
    sent = json.loads(with_answers(call, [said, f"an answer with {mark}"]).body)
    contents = [content for _, content in sent["messages"]]
    assert contents[1::2] == [said, f"an answer with {mark}"]
    assert contents[::2] == [message.content for message in conversation[2].messages[::2]]


def test_turns_are_grouped_and_single_requests_stay_alone():
    single = prepare({"num_prompts": 2}).requests
    requests = [*single, *(one for each in conversations(num_prompts=2) for one in each), single[0]]
    calls = [Call(request=one, path="/", headers={}, body=b"") for one in requests]
    assert [len(group) for group in grouped(calls)] == [1, 1, 3, 3, 1]
    assert [call for group in grouped(calls) for call in group] == calls
    assert list(grouped([])) == []


CLOSED = {"kind": "closed-loop", "max_concurrency": 2}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"workload.dataset": "gsm8k"}, "which has no conversations; choose synthetic or sharegpt"),
        ({"workload.turns.answers": "recorded"}, "written conversations have no answers"),
        ({"workload.samples_per_prompt": 2}, "a conversation goes on from one answer"),
        ({"workload.repeat": True}, "conversations are not sent again"),
        ({"load.begin": "running", "workload.arrival": CLOSED}, "take over no slots; set it to drained"),
        ({"workload.arrival": CLOSED | {"launch_rate_limit": 5.0}}, "due when their users have thought"),
        (
            {"workload.arrival": {"kind": "poisson", "request_rate": 1.0, "max_concurrency": 4}},
            "users of conversations arrive when they are due",
        ),
    ],
)
def test_what_does_not_go_together_with_conversations_is_refused(changes, problem, tmp_path):
    document = profile_of(WRITTEN).model_dump(mode="json") | {"stop": "forced"}
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = document
        for name in sections:
            section = section[name]
        section[last] = value
    path = tmp_path / "p.yaml"
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=problem):
        load_profile(str(path))


def test_of_several_numbers_of_turns_recorded_conversations_have_the_largest_at_most(shared):
    texts = [f"{text} {i}" for i in range(4) for text in (ASKED, ANSWERED)]
    assert [one.turn for one in shared(row(*texts), number=[2, 3])] == [0, 1, 2]
