"""The request sets of an experiment: read from its directory, chosen by load point."""

import hashlib
from pathlib import Path

from support.results.builders import edit_manifest, prepared, write_results

from benchctl.records.directory import RequestSets
from benchctl.records.files import encode
from benchctl.records.record import PreparedRequest, RequestSet


def content_of(requests: tuple[PreparedRequest, ...]) -> bytes:
    return b"".join(encode(request) + b"\n" for request in requests)


def test_a_directory_without_a_list_of_sets_has_one_for_all_points(tmp_path: Path) -> None:
    results = write_results(tmp_path)
    assert results.request_sets().of({"max_concurrency": 8}) == tuple(results.prepared_requests())


def test_a_load_point_gets_the_set_of_its_lengths_whatever_else_is_in_its_cell(tmp_path: Path) -> None:
    results = write_results(tmp_path)
    sets = {length: prepared(length, output_tokens=length) for length in (2, 3)}
    listed = []
    for number, (length, requests) in enumerate(sets.items(), start=1):
        file, content = f"requests{'' if number == 1 else f'-{number}'}.jsonl", content_of(requests)
        (results.path / file).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        listed.append(RequestSet(cell={"output_len": length}, file=file, sha256=digest))
    edit_manifest(results, request_sets=tuple(listed))
    stored = results.request_sets()
    assert stored.of({"max_concurrency": 8, "output_len": 3, "top_k": 1}) == sets[3]
    assert stored.of({"output_len": 2}) == sets[2]
    assert stored.of({"output_len": 4}) == ()


def test_a_single_set_is_that_of_every_cell() -> None:
    requests = prepared(2, output_tokens=4)
    assert RequestSets.single(iter(requests)).of({"top_k": 1}) == requests
