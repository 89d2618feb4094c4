"""Request sets of load points: which share one, their bytes and hashes, and a directory that holds several."""

import hashlib

import pytest
from support.prepared import profile_of

from benchctl.errors import RecordError
from benchctl.measure.directory import Origin, reopen_experiment
from benchctl.measure.experiment import create_experiment
from benchctl.profile.model import Profile
from benchctl.profile.settings import load_points, under_load
from benchctl.records.integrity import read_digests, verify_directory
from benchctl.workload.prepare import lengths_profile, prepare_requests

SYNTHETIC = {"dataset": "synthetic", "input_len": 30, "output_len": 8, "num_prompts": 40}
CLOSED = {**SYNTHETIC, "arrival": {"max_concurrency": 4}}
POISSON = {**SYNTHETIC, "arrival": {"kind": "poisson", "request_rate": 5.0}}


def curve(workload: dict, sweep: dict) -> Profile:
    return profile_of(workload, stop="forced").model_copy(
        update={"sweep": {factor: tuple(values) for factor, values in sweep.items()}}
    )


def test_closed_loops_of_different_concurrency_share_a_set_with_the_bytes_of_each_alone():
    profile = curve(CLOSED, {"max_concurrency": [1, 4, 16]})
    prepared = prepare_requests(profile)
    assert prepared.others == ()
    assert prepared.listed == ()
    assert prepared.cell == {}
    for point in load_points(profile):
        assert (
            prepare_requests(under_load(profile, point).model_copy(update={"sweep": {}})).content
            == prepared.content
        )
        assert prepared.sets.of(point) == prepared.requests


@pytest.mark.parametrize(
    ("workload", "sweep", "num_sets"),
    [
        (POISSON, {"request_rate": [2.0, 5.0]}, 2),
        (CLOSED, {"input_len": [20, 60], "max_concurrency": [1, 4]}, 2),
        (CLOSED, {"output_len": [4, 8], "input_len": [20, 60]}, 4),
        ({**CLOSED, "prompts_per_slot": 5}, {"max_concurrency": [1, 4, 16]}, 3),
    ],
    ids=["rates", "lengths", "both-lengths", "prompts-per-slot"],
)
def test_rates_and_lengths_have_a_set_each_byte_for_byte_that_of_this_load_alone(workload, sweep, num_sets):
    profile = curve(workload, sweep)
    prepared = prepare_requests(profile)
    assert len({each.sha256 for each in (prepared, *prepared.others)}) == num_sets == 1 + len(prepared.others)
    for point in load_points(profile):
        alone = prepare_requests(under_load(profile, point).model_copy(update={"sweep": {}}))
        assert prepared.sets.of(point) == alone.requests
    assert [each.file for each in prepared.listed] == [
        "requests.jsonl", *(f"requests-{i}.jsonl" for i in range(2, num_sets + 1))
    ]  # fmt: skip


def test_other_rates_send_the_same_texts_at_other_times():
    slow, fast = (
        requests for _, requests in prepare_requests(curve(POISSON, {"request_rate": [2.0, 5.0]})).sets.sets
    )
    assert [request.prompt for request in slow] == [request.prompt for request in fast]
    assert slow[-1].arrival_ns > fast[-1].arrival_ns


def test_all_sets_are_in_the_directory_and_a_changed_one_is_refused_on_resume(tmp_path):
    profile = curve(CLOSED, {"input_len": [20, 60]})
    prepared = prepare_requests(profile)
    results = create_experiment(profile, prepared, Origin(output_root=tmp_path, argv=("benchctl",)))
    listed = results.manifest().request_sets
    assert [each.cell for each in listed] == [{"input_len": 20}, {"input_len": 60}]
    assert results.manifest().request_set_sha256 == listed[0].sha256
    for each in listed:
        content = (results.path / each.file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == each.sha256
        assert each.file in read_digests(results.path).files
    assert results.request_sets() == prepared.sets
    assert reopen_experiment(results.path, None).results.path == results.path

    with (results.path / "requests-2.jsonl").open("a") as file:
        file.write("\n")
    assert "requests-2.jsonl" in [change.file for change in verify_directory(results.path).alterations]
    with pytest.raises(RecordError, match=r"requests-2\.jsonl was changed since the experiment began"):
        reopen_experiment(results.path, None)


def test_natural_lengths_are_measured_once_for_all_loads():
    profile = curve({**CLOSED, "prompts_per_slot": 5}, {"max_concurrency": [1, 4]})
    first = lengths_profile(profile.model_copy(update={"per_server": "ladder"}))
    assert (first.sweep, first.cells, first.per_server) == ({}, (), "fresh")
    assert len(prepare_requests(first).requests) == 40
