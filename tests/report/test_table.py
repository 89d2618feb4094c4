"""Numbers, tables and Markdown: the digits, signs and forms that every table, sentence and page shares."""

import csv
import io

import pytest
from rich.text import Text

from benchctl import units
from benchctl.cli.screen import wide_console
from benchctl.report.table import Column, Table, csv_bytes, fenced, markdown_text, table_of

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


SAMPLES = [
    (units.four_digits, 1234.5, "1234"),
    (units.four_digits, 1.5, "1.500"),
    (units.four_digits, 0.0, "0"),
    (units.four_digits, 0.00123456, "0.0012"),
    (units.four_digits, None, "-"),
    (units.signed_four_digits, -2.0, "-2.000"),
    (units.three_digits, 1.5, "1.50"),
    (units.three_digits, 150.0, "150"),
    (units.signed_three_digits, 0.0004, "+0"),
    (units.signed_three_digits, -58.23, "-58.2"),
    (units.signed_three_digits, 0.0123456, "+0.012"),
    (units.short_number, 1234.5, "1,234"),
    (units.short_number, 99.94, "99.9"),
    (units.short_number, 9.999, "10.00"),
    (units.short_number, 0.25, "0.25"),
    (units.short_number, 0.0123, "0.0123"),
    (units.whole, 3.0, "3"),
    (units.percentage, 0.025, "2.5%"),
    (units.percentage_change, 0.1432, "+14.3%"),
    (units.percentage_change, -0.00432, "-0.43%"),
    (units.change_of_ratio, 5.58, "+458%"),
    (units.change_of_ratio, 0.987, "-1.3%"),
    (units.change_of_ratio, 1.0002, "+0.02%"),
    (units.scatter, 0.0061, "± 0.6%"),
    (units.scatter, 0.0, ""),
    (units.p_value, 0.04, "0.040"),
    (units.p_value, 0.0001, "<0.001"),
    (units.gib, 85_899_345_920, "80.0 GiB"),
    (units.gib, None, "n/a"),
    (units.megabytes, 1_234_567_890, "1,234.6 MB"),
    (units.milliseconds, 1_234_567, "1.23"),
    (units.milliseconds, None, "unknown"),
    (units.duration, 40.2, "40 s"),
    (units.duration, 720.0, "12 min"),
    (units.duration, 12_600.0, "3.5 h"),
    (units.range_of, [8, 6, 8], "6 to 8"),
    (units.range_of, [8, 8], "8"),
    (units.minus, "a-b", "a-b"),
    (units.minus_in_numbers, "a-b [-2.1%, -1]", "a-b [\N{MINUS SIGN}2.1%, \N{MINUS SIGN}1]"),
]


@pytest.mark.parametrize(("form", "value", "text"), SAMPLES)
def test_a_number_is_written_in_one_way(form, value, text):
    assert form(value) == text


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("+55.4% [+52.9%, +57.9%] in top_k=5", r"+55.4% [+52.9%, +57.9%] in top\_k=5"),
        ("a|b*c*`d`~~e~~\\", r"a\|b\*c\*\`d\`\~\~e\~\~" + "\\\\"),
        ("<img src=x onerror=alert(1)>", r"\<img src=x onerror=alert(1)>"),
        ("[text](//evil) ![x][y] [z]: /url", r"[text\](//evil) ![x\][y] [z\]: /url"),
        ("@octocat fixes #12", "@&#8203;octocat fixes #&#8203;12"),
        ("https://evil.example or www.evil.example", "https:&#8203;//evil.example or www&#8203;.evil.example"),
        ("$\\frac{1}{2}$ &lt;b", "&#36;\\\\frac{1}{2}&#36; \\&lt;b"),
        ("\x1b]0;t\x07\x9b31m\u202e\nnext\tcell", "\\\\x1b]0;t\\\\x07\\\\x9b31m\\\\u202e\\\\nnext\\\\tcell"),
    ],
)
def test_a_text_is_shown_as_it_is(text: str, markdown: str) -> None:
    assert markdown_text(text) == markdown


def test_a_block_of_code_ends_where_it_should() -> None:
    assert fenced("a\n```\n# b\x1b[2J\n````") == "`````text\na\n```\n# b\\x1b[2J\n````\n`````"
    assert fenced("plain") == "```text\nplain\n```"


def test_a_text_of_a_megabyte_is_cut() -> None:
    assert len(markdown_text("x" * 1_000_000)) == 2_000
