"""One table in all its forms."""

import csv
import io

from rich.text import Text

from benchctl.cli.screen import wide_console
from benchctl.report.table import Column, Table, csv_bytes, table_of

TABLE = Table(
    "Times of 2 arms | in a title that is wider than its table",
    (Column("arm", "arm", is_left=True), Column("mean_ms", "mean", lambda mean: f"{mean:.1f}"), Column("note", "")),
    (
        {"arm": "baseline", "mean_ms": 9.96, "note": "[1]"},
        {"arm": "guided\n@top_k=5", "mean_ms": None, "note": ""},
        {"arm": "lost"},
    ),
)


def printed(drawn: object) -> list[str]:
    console = wide_console()
    with console.capture() as capture:
        console.print(drawn)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_what_is_unknown_is_a_hyphen_and_what_is_absent_is_empty() -> None:
    assert TABLE.texts() == [["baseline", "10.0", "[1]"], ["guided\n@top_k=5", "-", ""], ["lost", "", ""]]


def test_a_terminal_shows_each_row_in_one_line_below_a_title_in_one_line() -> None:
    assert printed(TABLE) == [
        "Times of 2 arms | in a title that is wider than its table",
        "arm               mean",
        "baseline          10.0  [1]",
        "guided\\n@top_k=5     -",
        "lost",
    ]


def test_painted_and_folding_tables_say_the_same() -> None:
    assert printed(TABLE.drawn(Text)) == printed(TABLE.drawn(folds=True)) == printed(TABLE)


def test_a_table_without_headings_has_no_line_of_them() -> None:
    columns = (Column("what", "", is_left=True), Column("text", "", is_left=True))
    assert printed(Table("", columns, ({"what": "load", "text": "all at once"},))) == ["load  all at once"]


def test_markdown_shows_fields_as_they_are() -> None:
    assert TABLE.markdown().splitlines()[2:4] == [
        "| baseline | 10.0 | [1] |",
        "| guided\\\\n@&#8203;top\\_k=5 | - |  |",
    ]


def test_a_table_of_tuples_has_their_order_and_shorter_ones_leave_fields_empty() -> None:
    table = table_of(("arm", "runs"), [("a", 3), ("b", None), ("c",)], left=("arm",))
    assert table.texts() == [["a", "3"], ["b", "-"], ["c", ""]]
    assert [column.is_left for column in table.columns] == [True, False]


def test_csv_has_numbers_in_full_and_computes_nothing() -> None:
    content = csv_bytes(("arm", "mean_ms"), [{"arm": "=1+1", "mean_ms": 1 / 3}, {"arm": "b", "mean_ms": None}])
    assert list(csv.reader(io.StringIO(content.decode()))) == [["arm", "mean_ms"], ["'=1+1", str(1 / 3)], ["b", ""]]
