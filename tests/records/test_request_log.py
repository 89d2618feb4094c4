"""The requests of a run: the numbers of their chunks are arrays once loaded, and mean what the lines say."""

from array import array

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchctl.analysis.metrics.latency import itls_ns, latencies_ns, num_simultaneous, pooled_itls_ns
from benchctl.records.directory import RunDirectory
from benchctl.records.files import encode
from benchctl.records.loaded import load_run
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord, RunRecord

FIELDS = ("chunk_ns", "chunk_late_ns", "chunk_tokens", "chunk_chars")
counts = st.integers(0, 300) | st.integers(0, 2**40)
times = st.lists(st.integers(0, 2**62), max_size=5).map(sorted).map(tuple)


@st.composite
def choices(draw):
    chunk_ns = draw(times)
    numbers = st.none() | st.lists(counts, min_size=len(chunk_ns), max_size=len(chunk_ns)).map(tuple)
    fields = {name: draw(numbers) for name in FIELDS[1:]}
    return ChoiceRecord(index=0, chunk_ns=chunk_ns, text=draw(st.text(max_size=9)), **fields)


records = st.builds(
    RequestRecord,
    request_id=st.text(max_size=5),
    index=counts,
    is_warmup=st.booleans(),
    scheduled_ns=counts,
    choices=st.lists(choices(), max_size=3).map(tuple),
    error=st.none() | st.builds(RequestError, kind=st.text(max_size=5), message=st.text(max_size=5)),
)


def loaded(path, requests):
    """The requests of a run as they are read."""
    directory = RunDirectory(path)
    directory.write(RunRecord(schema_version=3, index=0, run_id="r", block=0, position=0, variant="v"))
    directory.request_log.write_bytes(b"".join(encode(request) + b"\n" for request in requests))
    run = load_run(directory)
    assert run.warnings == ()
    return run.requests


def plainly(requests):
    """Requests whose numbers are tuples, as they are written."""
    for request in requests:
        for choice in request.choices:
            for name in FIELDS:
                if (numbers := getattr(choice, name)) is not None:
                    msgspec.structs.force_setattr(choice, name, tuple(numbers))
    return list(requests)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(requests=st.lists(records, max_size=6))
def test_a_record_is_what_its_line_says(tmp_path, requests):
    read = loaded(tmp_path / "run", requests)
    numbers = [getattr(choice, name) for request in read for choice in request.choices for name in FIELDS]
    assert {type(each) for each in numbers if each} <= {array}
    assert plainly(read) == requests


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 2**62), max_size=4).map(sorted), max_size=3), max_size=4))
def test_gaps_of_arrays_are_those_of_tuples(tmp_path, times):
    requests = [
        RequestRecord(
            request_id=str(i),
            index=i,
            scheduled_ns=0,
            sent_ns=0,
            done_ns=2**62,
            choices=tuple(ChoiceRecord(index=c, chunk_ns=tuple(ns)) for c, ns in enumerate(of_request)),
        )
        for i, of_request in enumerate(times)
    ]
    read = loaded(tmp_path / "run", requests)
    assert pooled_itls_ns(read) == pooled_itls_ns(requests)
    assert num_simultaneous(read) == pooled_itls_ns(read).count(0)
    assert [itls_ns(request) for request in read] == [itls_ns(request) for request in requests]
    assert latencies_ns(read) == latencies_ns(requests)


def test_a_time_that_comes_again_after_a_later_one_is_not_simultaneous():
    times = ChoiceRecord(
        index=0, chunk_ns=(10, 11, 10, 10)
    )  # the wall clock was set, which moves stamps of the kernel
    request = RequestRecord(request_id="0", index=0, scheduled_ns=0, choices=(times,))
    assert num_simultaneous([request]) == 1
