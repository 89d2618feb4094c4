"""Numbers as text: the digits, signs and units that every table, sentence and page shares."""

import pytest

from benchctl import formats

SAMPLES = [
    (formats.four_digits, 1234.5, "1234"),
    (formats.four_digits, 1.5, "1.500"),
    (formats.four_digits, 0.0, "0"),
    (formats.four_digits, 0.00123456, "0.0012"),
    (formats.four_digits, None, "-"),
    (formats.signed_four_digits, -2.0, "-2.000"),
    (formats.three_digits, 1.5, "1.50"),
    (formats.three_digits, 150.0, "150"),
    (formats.signed_three_digits, 0.0004, "+0"),
    (formats.signed_three_digits, -58.23, "-58.2"),
    (formats.signed_three_digits, 0.0123456, "+0.012"),
    (formats.short_number, 1234.5, "1,234"),
    (formats.short_number, 99.94, "99.9"),
    (formats.short_number, 9.999, "10.00"),
    (formats.short_number, 0.25, "0.25"),
    (formats.short_number, 0.0123, "0.0123"),
    (formats.whole, 3.0, "3"),
    (formats.percentage, 0.025, "2.5%"),
    (formats.percentage_change, 0.1432, "+14.3%"),
    (formats.percentage_change, -0.00432, "-0.43%"),
    (formats.change_of_ratio, 5.58, "+458%"),
    (formats.change_of_ratio, 0.987, "-1.3%"),
    (formats.change_of_ratio, 1.0002, "+0.02%"),
    (formats.scatter, 0.0061, "± 0.6%"),
    (formats.scatter, 0.0, ""),
    (formats.p_value, 0.04, "0.040"),
    (formats.p_value, 0.0001, "<0.001"),
    (formats.gib, 85_899_345_920, "80.0 GiB"),
    (formats.gib, None, "n/a"),
    (formats.megabytes, 1_234_567_890, "1,234.6 MB"),
    (formats.milliseconds, 1_234_567, "1.23"),
    (formats.milliseconds, None, "unknown"),
    (formats.duration, 40.2, "40 s"),
    (formats.duration, 720.0, "12 min"),
    (formats.duration, 12_600.0, "3.5 h"),
    (formats.range_of, [8, 6, 8], "6 to 8"),
    (formats.range_of, [8, 8], "8"),
    (formats.minus, "a-b", "a-b"),
    (formats.minus_in_numbers, "a-b [-2.1%, -1]", "a-b [\N{MINUS SIGN}2.1%, \N{MINUS SIGN}1]"),
]


@pytest.mark.parametrize(("form", "value", "text"), SAMPLES)
def test_a_number_is_written_in_one_way(form, value, text):
    assert form(value) == text
