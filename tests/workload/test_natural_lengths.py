"""Natural lengths: read from a directory that measured them, forced with replay-natural, refused with a reason."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.results.builders import edit_manifest, edit_requests, edit_run, write_results

from benchctl.errors import ProfileError, UsageError
from benchctl.profile.load import parse_profile, profile_from_plain
from benchctl.profile.model import Profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import encode
from benchctl.records.record import RequestRecord
from benchctl.workload.natural_lengths import lengths_profile, needs_lengths
from benchctl.workload.prepare import PreparedSet, prepare_requests

NUM_REQUESTS = 3


def profile_of(stop: str, lengths_from: Path | None = None, **workload: Any) -> Profile:
    document = {
        "name": "asked",
        "seed": 7,
        "stop": stop,
        "engine": {"kind": "sim"},
        "workload": {
            "dataset": "generated",
            "num_prompts": NUM_REQUESTS,
            "samples_as": "requests",
            "output_len": 9,
            "max_tokens": 400,
            "arrival": {"kind": "burst"},
            "lengths_from": None if lengths_from is None else str(lengths_from),
        }
        | workload,
        "variants": {"baseline": {}},
    }
    return profile_from_plain(document, "test")


def measured(path: Path, *blocks: tuple[int, ...], finish_reason: str = "stop") -> ResultDirectory:
    """Natural answers to the prompts of ``profile_of``: ``blocks[b][i]`` tokens to request i in block b."""
    natural = prepare_requests(profile_of("natural"))
    results = write_results(path, block_factors=({"baseline": 1.0, "guided": 1.0},) * len(blocks), n=1)
    results.write_prepared_requests(natural.content)
    edit_manifest(results, stop="natural")
    results.write_profile(results.profile_yaml().replace("samples_per_prompt: 2", "samples_per_prompt: 1"))
    for planned in results.plan().runs:
        lengths = blocks[planned.block]

        def answered(record: RequestRecord, lengths: tuple[int, ...] = lengths) -> RequestRecord | None:
            if record.index >= NUM_REQUESTS:
                return None
            choices = tuple(msgspec.structs.replace(c, finish_reason=finish_reason) for c in record.choices)
            return msgspec.structs.replace(
                record,
                request_id=natural.requests[record.index].request_id,
                completion_tokens=lengths[record.index],
                choices=choices,
            )

        edit_requests(results, planned.run_id, answered)
    return results


def prepare(stop: str, results: ResultDirectory, **workload: Any) -> PreparedSet:
    return prepare_requests(profile_of(stop, results.path, **workload))


def refusal_of(results: ResultDirectory, **workload: Any) -> str:
    with pytest.raises(ProfileError) as caught:
        prepare("replay-natural", results, **workload)
    message = str(caught.value)
    assert message.startswith(f"workload.lengths_from: {results.path} ")
    return message


def test_each_output_is_forced_to_the_length_that_was_seen_in_the_middle_of_its_blocks(tmp_path: Path) -> None:
    results = measured(tmp_path / "r", (5, 40, 7), (6, 20, 300), (9, 30, 8))
    prepared = prepare("replay-natural", results)
    assert [request.max_tokens for request in prepared.requests] == [6, 30, 8]
    assert [request.natural_tokens for request in prepared.requests] == [6, 30, 8]
    assert all(request.ignore_eos for request in prepared.requests)
    assert prepared.lengths_from == str(results.path)
    assert prepared.warnings == ()


def test_of_two_blocks_the_shorter_length_is_taken_so_that_nobody_decodes_past_both_ends(tmp_path: Path) -> None:
    prepared = prepare("replay-natural", measured(tmp_path / "r", (5, 40, 7), (6, 20, 8)))
    assert [request.max_tokens for request in prepared.requests] == [5, 20, 7]


def test_the_lengths_are_part_of_what_identifies_the_request_set(tmp_path: Path) -> None:
    first = prepare("replay-natural", measured(tmp_path / "a", (5, 40, 7)))
    second = prepare("replay-natural", measured(tmp_path / "b", (5, 40, 7)))
    third = prepare("replay-natural", measured(tmp_path / "c", (5, 41, 7)))
    assert first.sha256 == second.sha256 != third.sha256
    assert str(tmp_path).encode() not in first.content


def test_forced_outputs_keep_their_planned_length_and_know_their_natural_one(tmp_path: Path) -> None:
    prepared = prepare("forced", measured(tmp_path / "r", (5, 40, 7)))
    assert [(r.max_tokens, r.natural_tokens) for r in prepared.requests] == [(9, 5), (9, 40), (9, 7)]


def test_an_answer_without_a_token_is_forced_to_one(tmp_path: Path) -> None:
    prepared = prepare("replay-natural", measured(tmp_path / "r", (0, 40, 7)))
    assert prepared.requests[0].max_tokens == 1


def test_a_length_that_a_limit_cut_is_told_and_is_no_end_beyond_which_tokens_are_counted(tmp_path: Path) -> None:
    results = measured(tmp_path / "r", (5, 40, 7), finish_reason="length")
    assert [r.natural_tokens for r in prepare("forced", results).requests] == [None, 40, None]
    prepared = prepare("replay-natural", results)
    assert [r.natural_tokens for r in prepared.requests] == [5, 40, 7]
    (warning,) = prepared.warnings
    assert warning.code == "natural-lengths-cut"
    assert warning.message.startswith("3 of 3 natural lengths")


def test_failed_requests_and_failed_runs_tell_no_length(tmp_path: Path) -> None:
    results = measured(tmp_path / "r", (5, 40, 7), (6, 20, 8))
    edit_run(results, "002-b1-baseline", state="failed")
    assert [r.max_tokens for r in prepare("replay-natural", results).requests] == [5, 40, 7]
    edit_requests(
        results,
        "000-b0-baseline",
        lambda r: msgspec.structs.replace(r, completion_tokens=None) if r.index == 1 else r,
    )
    assert "has no length for 'generated-00001'" in refusal_of(results)


@pytest.mark.parametrize("finish_reason", ["error", "abort", "content_filter", "cancelled", "sudden_death"])
def test_an_answer_that_failed_or_ended_for_an_unknown_reason_tells_no_length(
    tmp_path: Path, finish_reason: str
) -> None:
    results = measured(tmp_path / "r", (6, 40, 7))

    def ended(record: RequestRecord) -> RequestRecord:
        choices = tuple(msgspec.structs.replace(c, finish_reason=finish_reason) for c in record.choices)
        return record if record.index else msgspec.structs.replace(record, choices=choices)

    edit_requests(results, "000-b0-baseline", ended)
    assert "has no length for 'generated-00000' and 0 other" in refusal_of(results)


def test_a_directory_without_a_measured_baseline_is_refused(tmp_path: Path) -> None:
    results = measured(tmp_path / "r", (5, 40, 7))
    edit_run(results, "000-b0-baseline", state="running")
    assert "has no finished run of its baseline" in refusal_of(results)


def test_a_directory_of_forced_lengths_is_refused(tmp_path: Path) -> None:
    results = measured(tmp_path / "r", (5, 40, 7))
    edit_manifest(results, stop="forced")
    assert "was measured with stop forced; name one that was measured with stop: natural" in refusal_of(results)


def test_other_prompts_are_refused_by_name(tmp_path: Path) -> None:
    results = measured(tmp_path / "r", (5, 40, 7))
    assert "has no request 'generated-00003'" in refusal_of(results, num_prompts=4)
    first, *others = results.prepared_requests()
    changed = (msgspec.structs.replace(first, messages=None, prompt="What is 1 + 1?"), *others)
    results.write_prepared_requests(b"".join(encode(request) + b"\n" for request in changed))
    assert "has another prompt as 'generated-00000'" in refusal_of(results)


def test_several_answers_in_one_request_have_no_length_each(tmp_path: Path) -> None:
    results = measured(tmp_path / "r", (5, 40, 7))
    several = [msgspec.structs.replace(request, n=2) for request in results.prepared_requests()]
    results.write_prepared_requests(b"".join(encode(request) + b"\n" for request in several))
    message = refusal_of(results)
    assert "asked for 2 answers in one request" in message
    assert "samples_as: requests" in message


@pytest.mark.parametrize(
    ("line", "what"),
    [("model: qwen2.5-1.5b", "model"), ("sampling: {temperature: 0.5}", "sampling")],
)
def test_lengths_of_another_model_or_sampling_are_refused(tmp_path: Path, line: str, what: str) -> None:
    results = measured(tmp_path / "r", (5, 40, 7))
    lines = [lines for lines in results.profile_yaml().splitlines() if not lines.startswith(f"{what}:")]
    results.write_profile("\n".join([*lines, line]))
    assert f"was measured with another {what} of its baseline" in refusal_of(results)


def test_a_place_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a result directory"):
        prepare_requests(profile_of("replay-natural", tmp_path / "nothing"))


def test_without_lengths_a_forced_natural_request_set_cannot_be_made() -> None:
    with pytest.raises(ProfileError, match="let 'benchctl run' do it"):
        prepare_requests(profile_of("replay-natural"))


def test_the_experiment_that_measures_lengths_is_the_baseline_alone_once_and_naturally() -> None:
    profile = parse_profile(
        json.dumps(
            profile_of("replay-natural").model_dump(mode="json")
            | {"variants": {"baseline": {}, "other": {}}, "sweep": {"top_k": [1, 2]}, "blocks": 8}
            | {"allowed_differences": ["sampling.top_k"]}
        ),
        "test",
    )
    assert needs_lengths(profile)
    pilot = lengths_profile(profile)
    assert (pilot.name, pilot.stop, pilot.blocks, tuple(pilot.variants)) == (
        "asked-lengths",
        "natural",
        1,
        ("baseline",),
    )
    assert pilot.workload == profile.workload
    assert not needs_lengths(pilot)


def errors_of(**changes: Any) -> str:
    workload = changes.pop("workload", {})
    with pytest.raises(ProfileError) as caught:
        profile_of(changes["stop"], Path("somewhere") if changes.get("given") else None, **workload)
    return str(caught.value)


def test_several_answers_in_one_request_are_an_error_of_the_profile() -> None:
    message = errors_of(stop="replay-natural", workload={"samples_as": "one-request", "samples_per_prompt": 4})
    assert "workload.samples_per_prompt: is 4 in one request" in message
    assert "set samples_as: requests" in message


def test_lengths_that_nothing_would_read_are_an_error_of_the_profile() -> None:
    message = errors_of(stop="natural", given=True)
    assert "workload.lengths_from: is not used with stop: natural" in message
