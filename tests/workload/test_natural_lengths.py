"""Natural lengths: read from a directory that measured them, forced with replay-natural, refused with a reason."""

import pytest
from msgspec.structs import replace
from support.results.builders import change_requests, edit_manifest, edit_requests, edit_run, write_results

from benchctl.errors import ProfileError, UsageError
from benchctl.profile.load import profile_from_plain
from benchctl.records.files import encode
from benchctl.workload.prepare import lengths_profile, needs_lengths, prepare_requests

NUM_REQUESTS = 3
FIRST = "000-b0-baseline"


def profile_of(stop, lengths_from=None, *, workload=None, **more):
    settings = {
        "dataset": "generated",
        "num_prompts": NUM_REQUESTS,
        "samples_as": "requests",
        "output_len": 9,
        "max_tokens": 400,
        "arrival": {"kind": "burst"},
        "lengths_from": None if lengths_from is None else str(lengths_from),
    } | (workload or {})
    document = {"name": "asked", "seed": 7, "stop": stop, "engine": {"kind": "sim"}, "variants": {"baseline": {}}}
    return profile_from_plain(document | more | {"workload": settings}, "test")


def measured(path, *blocks, finish_reason="stop"):
    """Natural answers to the prompts of ``profile_of``: ``blocks[b][i]`` tokens to request i in block b."""
    natural = prepare_requests(profile_of("natural"))
    results = write_results(path, block_factors=({"baseline": 1.0, "guided": 1.0},) * len(blocks), n=1)
    results.write_prepared_requests(natural.content)
    edit_manifest(results, stop="natural")
    results.write_profile(results.profile_yaml().replace("samples_per_prompt: 2", "samples_per_prompt: 1"))
    for planned in results.plan().runs:

        def answered(record, lengths=blocks[planned.block]):
            if record.index >= NUM_REQUESTS:
                return None
            return replace(
                record,
                request_id=natural.requests[record.index].request_id,
                completion_tokens=lengths[record.index],
                choices=tuple(replace(choice, finish_reason=finish_reason) for choice in record.choices),
            )

        edit_requests(results, planned.run_id, answered)
    return results


@pytest.fixture
def results(tmp_path):
    return measured(tmp_path / "r", (5, 40, 7))


def prepare(stop, results, **workload):
    return prepare_requests(profile_of(stop, results.path, workload=workload))


def lengths_of(results):
    return [request.max_tokens for request in prepare("replay-natural", results).requests]


def refusal_of(results, **workload):
    with pytest.raises(ProfileError) as caught:
        prepare("replay-natural", results, **workload)
    message = str(caught.value)
    assert message.startswith(f"workload.lengths_from: {results.path} ")
    return message


def test_each_output_is_forced_to_the_length_that_was_seen_in_the_middle_of_its_blocks(tmp_path):
    results = measured(tmp_path / "r", (5, 40, 7), (6, 20, 300), (9, 30, 8))
    prepared = prepare("replay-natural", results)
    assert [(r.max_tokens, r.natural_tokens) for r in prepared.requests] == [(6, 6), (30, 30), (8, 8)]
    assert all(request.ignore_eos for request in prepared.requests)
    assert (prepared.lengths_from, prepared.warnings) == (str(results.path), ())


def test_of_two_blocks_the_shorter_length_is_taken_so_that_nobody_decodes_past_both_ends(tmp_path):
    results = measured(tmp_path / "r", (0, 40, 7), (6, 20, 8))
    assert lengths_of(results) == [1, 20, 7]  # an answer without a token is forced to one
    edit_run(results, "002-b1-baseline", state="failed")
    assert lengths_of(results) == [1, 40, 7]


def test_the_lengths_are_part_of_what_identifies_the_request_set(results, tmp_path):
    first = prepare("replay-natural", results)
    second = prepare("replay-natural", measured(tmp_path / "b", (5, 40, 7)))
    third = prepare("replay-natural", measured(tmp_path / "c", (5, 41, 7)))
    assert first.sha256 == second.sha256 != third.sha256
    assert str(tmp_path).encode() not in first.content


def test_forced_outputs_keep_their_planned_length_and_know_their_natural_one(results):
    prepared = prepare("forced", results)
    assert [(r.max_tokens, r.natural_tokens) for r in prepared.requests] == [(9, 5), (9, 40), (9, 7)]


def test_a_length_that_a_limit_cut_is_told_and_is_no_end_beyond_which_tokens_are_counted(tmp_path):
    results = measured(tmp_path / "r", (5, 40, 7), finish_reason="length")
    assert [r.natural_tokens for r in prepare("forced", results).requests] == [None, 40, None]
    (warning,) = prepare("replay-natural", results).warnings
    assert (warning.code, warning.message[:22]) == ("natural-lengths-cut", "3 of 3 natural lengths")


def test_an_answer_that_failed_or_ended_for_an_unknown_reason_tells_no_length(results):
    choices = next(results.run(FIRST).requests()).choices
    for finish_reason in ("error", "abort", "content_filter", "cancelled", "sudden_death"):
        ended = tuple(replace(choice, finish_reason=finish_reason) for choice in choices)
        change_requests(results, FIRST, 0, choices=ended)
        assert "has no length for 'generated-00000' and 0 other" in refusal_of(results), finish_reason
    change_requests(results, FIRST, 1, completion_tokens=None)
    assert "has no length for 'generated-00000' and 1 other" in refusal_of(results)


def requests_with(**changes):
    """Writes the prepared requests anew, with changes."""

    def change(results):
        changed = (replace(request, **changes) for request in results.prepared_requests())
        results.write_prepared_requests(b"".join(encode(request) + b"\n" for request in changed))

    return change


def profile_with(what, line):
    """Writes another value into the stored profile."""

    def change(results):
        lines = [lines for lines in results.profile_yaml().splitlines() if not lines.startswith(f"{what}:")]
        results.write_profile("\n".join([*lines, line]))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda results: edit_manifest(results, stop="forced"),
            ["was measured with stop forced; name one"],
        ),
        (lambda results: edit_run(results, FIRST, state="running"), ["has no finished run of its baseline"]),
        (requests_with(messages=None, prompt="What is 1 + 1?"), ["has another prompt as 'generated-00000'"]),
        (requests_with(n=2), ["asked for 2 answers in one request", "samples_as: requests"]),
        (profile_with("model", "model: qwen2.5-1.5b"), ["was measured with another model of its baseline"]),
        (profile_with("sampling", "sampling: {temperature: 0.5}"), ["was measured with another sampling of its"]),
    ],
    ids=["forced", "unfinished", "prompt", "answers", "model", "sampling"],
)
def test_a_directory_that_cannot_tell_the_lengths_is_refused(results, change, words):
    assert "has no request 'generated-00003'" in refusal_of(results, num_prompts=4)
    change(results)
    assert all(word in refusal_of(results) for word in words)


def test_without_lengths_a_forced_natural_request_set_cannot_be_made(tmp_path):
    with pytest.raises(UsageError, match="is not a result directory"):
        prepare_requests(profile_of("replay-natural", tmp_path / "nothing"))
    with pytest.raises(ProfileError, match="let 'benchctl run' do it"):
        prepare_requests(profile_of("replay-natural"))


def test_the_experiment_that_measures_lengths_is_the_baseline_alone_once_and_naturally():
    variants = {"baseline": {}, "other": {}}
    swept = {"sweep": {"top_k": [1, 2]}, "allowed_differences": ["sampling.top_k"]}
    profile = profile_of("replay-natural", variants=variants, blocks=8, **swept)
    assert needs_lengths(profile)
    pilot = lengths_profile(profile)
    described = (pilot.name, pilot.stop, pilot.blocks, tuple(pilot.variants))
    assert described == ("asked-lengths", "natural", 1, ("baseline",))
    assert pilot.workload == profile.workload
    assert not needs_lengths(pilot)


def test_lengths_that_contradict_the_profile_are_an_error_of_the_profile():
    several = {"samples_as": "one-request", "samples_per_prompt": 4}
    with pytest.raises(ProfileError, match=r"samples_per_prompt: is 4 in one request.*set samples_as: requests"):
        profile_of("replay-natural", workload=several)
    with pytest.raises(ProfileError, match=r"workload\.lengths_from: is not used with stop: natural"):
        profile_of("natural", "somewhere")
