"""Counters of a server that states what no counter can be."""

import pytest

from benchctl.analysis.metrics.server_counters import COUNTERS, measure_growth, measure_growth_by_position
from benchctl.engines.metrics_page import series_of
from benchctl.records.schema import PrometheusSample

POSITION = COUNTERS.accepted_by_position[0]
GENERATED = COUNTERS.generated_tokens[0]


def samples(*pages: str) -> list[PrometheusSample]:
    return [PrometheusSample(t_ns=i, values=series_of(page)) for i, page in enumerate(pages)]


def test_a_position_that_no_draft_has_is_left_out() -> None:
    pages = [f'{POSITION}{{position="0"}} {i}\n{POSITION}{{position="{10**14}"}} {i}\n' for i in (1, 4)]
    assert measure_growth_by_position(samples(*pages), COUNTERS.accepted_by_position) == (3,)


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e19", "NaN", "+Inf"])
def test_a_count_beyond_64_bits_is_unknown(value: str) -> None:
    page = f'{GENERATED}{{a="1"}} {value}\n{GENERATED}{{a="2"}} {value}\n'
    assert measure_growth(samples(page, page), COUNTERS.generated_tokens) is None


def test_counters_that_go_back_are_what_they_are() -> None:
    grown = measure_growth(samples(f"{GENERATED} 9\n", f"{GENERATED} 4\n"), COUNTERS.generated_tokens)
    assert grown is not None
    assert grown.count == -5
