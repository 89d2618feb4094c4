"""Passes of a value model have few sizes: whichever rows have no choice, nearly all repeat a recorded one."""

import pytest

pytest.importorskip("torch", reason="torch is not installed here")
pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from benchmarks.guided.graph_shapes import LEAST_REPLAYED, MOST_PADDING, decode


@pytest.mark.parametrize(
    ("share", "batch", "candidates", "reuse"),
    [(0.0, 33, 2, True), (0.3, 40, 5, True), (0.7, 3, 5, False), (0.5, 20, 3, False)],
)
def test_nearly_every_step_replays_and_hardly_any_token_is_padding(share, batch, candidates, reuse):
    cell = decode(share, batch, candidates, 60, reuse=reuse)
    # A batch whose rows all have no choice scores nothing.
    assert cell.steps >= 60 * (1 - share**batch) * 0.9
    assert cell.replayed >= LEAST_REPLAYED * cell.steps
    assert (cell.recorded, cell.eager) == (0, 0)
    assert cell.padding <= MOST_PADDING


def test_without_recording_at_the_start_the_same_decode_records_in_its_middle():
    cell = decode(0.3, 16, 5, 60, record=False)
    assert cell.recorded > 5
    assert not cell.holds
