"""Text from outside is shown with its control characters as escapes, and cut."""

import pytest

from benchctl.untrusted.text import csv_cell, visible, visible_line


def test_control_sequences_are_shown_as_escapes() -> None:
    assert visible("a\x1b[31mred\x07\x9bno\u202ered") == "a\\x1b[31mred\\x07\\x9bno\\u202ered"


def test_plain_text_of_any_script_is_unchanged() -> None:
    assert visible("Straße 東京\tعربي\n") == "Straße 東京\tعربي\n"


def test_line_ends_of_http_are_line_ends() -> None:
    assert visible("a\r\nb\rc") == "a\nb\\x0dc"


def test_a_long_text_is_cut() -> None:
    assert visible("x" * 50, 10) == "x" * 9 + "…"
    assert visible_line("\n" * 50, 10) == "\\n" * 4 + "\\…"


def test_one_line_stays_one_line() -> None:
    assert visible_line("a\nb\tc") == "a\\nb\\tc"


@pytest.mark.parametrize("text", ["=cmd()", "+1+cmd", "-a", "@sum(1)", "\t=cmd()", "  =1", "\n@a", "＝cmd()"])  # noqa: RUF001
def test_a_spreadsheet_gets_no_formula(text: str) -> None:
    assert csv_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["-1.5", "+3", "top_k=5", "", -2.5, None, "a@b"])
def test_numbers_and_plain_texts_stay_as_they_are_in_a_table(value: object) -> None:
    assert csv_cell(value) == value


def test_a_cell_has_no_control_characters() -> None:
    assert csv_cell("\r=cmd()\x1b") == "\\x0d=cmd()\\x1b"
