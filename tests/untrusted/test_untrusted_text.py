"""Text from outside is shown with its control characters as escapes, and cut."""

from benchctl.untrusted.text import visible, visible_line


def test_control_sequences_are_shown_as_escapes() -> None:
    assert visible("a\x1b[31mred\x07\x9bno\u202ered") == "a\\x1b[31mred\\x07\\x9bno\\u202ered"


def test_plain_text_of_any_script_is_unchanged() -> None:
    assert visible("Straße 東京\tعربي\n") == "Straße 東京\tعربي\n"


def test_line_ends_of_http_are_line_ends() -> None:
    assert visible("a\r\nb\rc") == "a\nb\\x0dc"


def test_a_long_text_is_cut() -> None:
    assert visible("x" * 50, 10) == "x" * 9 + "…"


def test_one_line_stays_one_line() -> None:
    assert visible_line("a\nb\tc") == "a\\nb\\tc"
