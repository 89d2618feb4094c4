"""Prompts that share a planned prefix: what they have in common, how it is primed, and what is refused."""

from itertools import combinations, takewhile

import msgspec
import pytest
from support.prepared import profile_of
from support.tokenizer_kinds import byte_level

from benchctl.errors import ProfileError
from benchctl.measure.warmup import prime_bursts
from benchctl.profile.load import load_profile
from benchctl.profile.model import Workload
from benchctl.profile.sections import SharedPrefix
from benchctl.workload.prepare import prepare_requests
from benchctl.workload.tokenizers import Estimate

GROUPS = {"dataset": "synthetic", "num_prompts": 12, "prefix": {"groups": 3, "hit_rate": 0.75, "block": 8}}
LENGTHS = [128, [96, 160], {"mean": 128.0, "cv": 0.2, "min": 96}]


def text_of(request) -> str:
    return request.prompt if request.messages is None else request.messages[0].content


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("input_len", LENGTHS, ids=["fixed", "list", "range"])
@pytest.mark.parametrize("tokenizer", [Estimate(), byte_level(2000, adds_bos=True)], ids=["estimate", "trained"])
def test_prompts_of_a_group_share_their_prefix_and_others_share_nothing(tokenizer, input_len, chat):
    workload = GROUPS | {"input_len": input_len, "chat": chat}
    requests = prepare_requests(profile_of(workload, stop="natural"), tokenizer=tokenizer).requests
    for request in requests:
        assert request.shared_tokens == SharedPrefix(**GROUPS["prefix"]).tokens_of(request.prompt_tokens)
        assert abs(request.shared_tokens - 0.75 * request.prompt_tokens) <= 4, "the nearest whole block"
    for one, other in combinations(requests, 2):
        pairs = zip(text_of(one).split(), text_of(other).split(), strict=False)
        alike = [word for word, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        shorter = min(one, other, key=lambda request: request.shared_chars)
        is_of_group = one.index % 3 == other.index % 3
        assert alike == (text_of(shorter)[: shorter.shared_chars].split() if is_of_group else [])


def test_a_prefix_has_its_planned_tokens_in_the_text():
    tokenizer = byte_level(2000)
    for request in prepare_requests(profile_of(GROUPS | {"input_len": 64}), tokenizer=tokenizer).requests:
        prefix, whole = request.prompt[: request.shared_chars], tokenizer.ids(request.prompt)
        assert tokenizer.ids(prefix)[: request.shared_tokens] == whole[: request.shared_tokens]
        assert len(tokenizer.ids(prefix)) - request.shared_tokens in {0, 1}, (
            "a small vocabulary adds one of its own"
        )


def test_the_longest_prefix_of_each_group_is_primed_twice_with_an_ending_of_its_own():
    profile = profile_of(GROUPS | {"input_len": LENGTHS[2]})
    requests = prepare_requests(profile).requests
    bursts = prime_bursts(requests, profile.workload.prefix)
    assert [len(burst) for burst in bursts] == [3, 3]
    for group, (first, second) in enumerate(zip(*bursts, strict=True)):
        longest = max(requests[group::3], key=lambda request: request.shared_tokens)
        endings = {each.prompt.removeprefix(longest.prompt[: longest.shared_chars]) for each in (first, second)}
        assert sorted(map(len, endings)) == [9, 9], "a blank and eight characters, different ones"
        assert (first.max_tokens, second.max_tokens) == (1, 1)
        for request in requests[group::3]:
            assert first.prompt.startswith(request.prompt[: request.shared_chars])
    assert prime_bursts(requests, None) == ()
    many = [msgspec.structs.replace(requests[0], index=i) for i in range(150)]
    assert [len(burst) for burst in prime_bursts(many, SharedPrefix(groups=100, len=16))] == [64, 36, 64, 36]


def test_a_set_without_a_prefix_has_the_bytes_it_always_had_and_one_with_a_prefix_has_its_own():
    plain = {"dataset": "synthetic", "num_prompts": 12, "input_len": 64}
    prepared = prepare_requests(profile_of(plain))
    assert prepared.sha256 == "59f8dec760cdf613d52657c5f91f16b2499f2a5c1c3cddf6ebe0d72cdb2c5dbc"
    assert b'"shared_' not in prepared.content
    assert (
        prepare_requests(profile_of(GROUPS | {"input_len": 64})).sha256
        == "88b9aa255eef2672dec4c090570e12d907ffd7d11b4d7c43652e6d49e531d02f"
    )


def test_a_longer_set_extends_a_shorter_one():
    short, long = (
        prepare_requests(profile_of(GROUPS | {"input_len": LENGTHS[2], "num_prompts": number})).requests
        for number in (7, 12)
    )
    assert long[:7] == short


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["prefix={groups: 4}"], "workload: prefix needs hit_rate or len, and not both; set one of them"),
        (
            ["prefix={hit_rate: 0.5, len: 64}"],
            "workload: prefix needs hit_rate or len, and not both; set one of them",
        ),
        (["prefix={hit_rate: 1.5}"], "is 1.5; it must be below 1"),
        (
            ["prefix={len: 512}"],
            "workload: prefix.len is 512, and prompts have 256 tokens at most; lower it",
        ),
        (
            ["prefix={hit_rate: 0.02}"],
            "workload: prefix comes to no block of 16 tokens in a prompt of 256; raise it",
        ),
        (
            ["prefix={len: 64}", "samples_per_prompt=2"],
            "from the second on the cache has more of a prompt than its",
        ),
    ],
)
def test_a_prefix_that_cannot_be_is_refused(assignments, message):
    overrides = ["workload.dataset=synthetic", "workload.input_len=256"]
    with pytest.raises(ProfileError) as error:
        load_profile("ci-smoke", overrides=[*overrides, *(f"workload.{each}" for each in assignments)])
    assert message in str(error.value)


def test_a_prefix_needs_prompts_that_are_written_and_room_beside_what_the_server_adds():
    with pytest.raises(ProfileError, match="with dataset generated, whose prompts have texts of their own"):
        prepare_requests(profile_of({"prefix": {"hit_rate": 0.5}}))
    tight = GROUPS | {"input_len": 64, "prefix": {"len": 62, "block": 1}, "chat": True}
    with pytest.raises(ProfileError, match="has no room for it beside a token of its own and what the server adds"):
        prepare_requests(profile_of(tight), tokenizer=byte_level(2000))


def test_several_loads_with_cached_prompts_need_an_engine_that_takes_a_salt():
    arguments = [
        "loads_per_server=3",
        "workload.samples_per_prompt=1",
        "workload.dataset=synthetic",
        "workload.input_len=256",
    ]
    for engine, is_refused in (("sim", False), ("vllm", False), ("llamacpp", True), ("transformers", True)):
        for allowed in ("workload.prefix={len: 64}", "workload.allow_prefix_cache_hits=true"):
            settings = [*arguments, allowed, f"engine.kind={engine}"]
            if not is_refused:
                assert load_profile("ci-smoke", overrides=settings).loads_per_server == 3
                continue
            ladder = ["per_server=ladder", "sweep={max_concurrency: [1, 2]}", "sweep_baseline=false"]
            for key, several in (("loads_per_server", settings), ("per_server", [*settings[1:], *ladder])):
                with pytest.raises(ProfileError) as error:
                    load_profile("ci-smoke", overrides=several)
                assert f"{key}: is " in str(error.value)
                assert f"the cache of engine '{engine}' cannot be emptied between loads" in str(error.value)


def test_a_hit_rate_is_rounded_to_whole_blocks_and_leaves_a_token():
    assert [SharedPrefix(hit_rate=0.8).tokens_of(length) for length in (640, 100, 16, 8)] == [512, 80, 0, 0]
    assert SharedPrefix(hit_rate=0.99).tokens_of(32) == 16
    assert [SharedPrefix(len=100).tokens_of(length) for length in (640, 90, 16)] == [96, 80, 0]
    assert Workload.model_fields["prefix"].default is None
