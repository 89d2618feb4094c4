"""Numbers as text: the digits, signs and units that every table, sentence and page shares."""

import pytest

from benchctl import units

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
