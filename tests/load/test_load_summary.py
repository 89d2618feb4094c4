"""The counts of a load while it goes on."""

from benchctl.load.tally import LoadSummary
from benchctl.records.record import RequestRecord


def sent_at(index: int, sent_ns: int) -> RequestRecord:
    return RequestRecord(
        request_id=f"r{index}", index=index, scheduled_ns=sent_ns, sent_ns=sent_ns, done_ns=sent_ns + 1, choices=()
    )


def test_a_load_begins_with_its_first_send_also_where_a_virtual_clock_begins_at_zero():
    summary = LoadSummary()
    for index, sent_ns in enumerate((0, 1_001_000_000, 500)):
        summary.count(sent_at(index, sent_ns))
    assert summary.first_send_ns == 0
