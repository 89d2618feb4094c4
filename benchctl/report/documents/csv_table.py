"""Rows as a CSV file, with numbers at full precision."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from benchctl.analysis.summary.columns import Value


def csv_bytes(columns: Sequence[str], rows: Iterable[Mapping[str, Value]]) -> bytes:
    """RFC 4180 with a header line; an unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if row[column] is None else row[column] for column in columns])
    return text.getvalue().encode()
