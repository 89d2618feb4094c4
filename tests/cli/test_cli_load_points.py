"""Load points at the command line: plans, curves of ladders and of fresh servers, and what each command refuses."""

from pathlib import Path

import pytest
from support.cli import WITHOUT_SERVERS, printed, refusal

pytestmark = pytest.mark.slow
CURVE = """
engine: sim-exact
blocks: 6
per_server: ladder
workload: {dataset: synthetic, input_len: 32, output_len: 8, num_prompts: 40, prompts_per_slot: 8,
  arrival: {max_concurrency: 8}}
sweep: {max_concurrency: [1, 4]}
variants: {baseline: {}, small-batch: {server: {max_num_seqs: 2}}}
"""


@pytest.fixture(name="curve", scope="module")
def _curve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile with a ladder, and its results ``ladder`` and, of fresh servers, ``fresh``."""
    cwd = tmp_path_factory.mktemp("curve")
    (cwd / "curve.yaml").write_text(CURVE)
    for kind in ("ladder", "fresh"):
        printed("simulate", "--profile", "curve.yaml", "--set", f"per_server={kind}", "-q", "-o", kind, cwd=cwd)
    return cwd


def test_a_plan_shows_the_loads_of_each_server_in_their_order(curve: Path) -> None:
    text = printed("run", "curve", "--dry-run", cwd=curve)
    assert "loads" in text.splitlines()[0]
    assert "max_concurrency 1, 4" in text
    assert (
        "12 runs in 6 blocks of 2, 2 load points on each server one after the other, 8 to 32 requests each" in text
    )
    fresh = printed("run", "curve", "--dry-run", "--set", "per_server=fresh", cwd=curve)
    assert "24 runs in 6 blocks of 4, 8 to 32 requests each" in fresh


def test_a_curve_compares_arms_under_the_same_load_and_not_a_ladder_with_fresh_servers(curve: Path) -> None:
    text = printed("compare", "ladder", cwd=curve, code=1)
    rows = [line.split()[0] for line in text.splitlines() if line.startswith("max_concurrency=")]
    assert rows == ["max_concurrency=1", "max_concurrency=4"]
    assert (
        printed("compare", "ladder:baseline", "ladder:small-batch", cwd=curve, code=1).count("max_concurrency=4 ")
        == 1
    )
    assert "8 to 32 requests of synthetic" in printed("show", "ladder", cwd=curve)
    assert "per_server: ladder against fresh" in refusal("compare", "ladder", "fresh", cwd=curve, code=4)
    allowed = printed("compare", "ladder", "fresh", "--allow-difference", "per_server", cwd=curve)
    assert "12 of 12 comparisons inside a margin of 1%" in allowed


def test_a_curve_with_one_load_more_is_compared_where_both_have_the_load(curve: Path) -> None:
    more = ["--set", "sweep.max_concurrency=[1, 2, 4]", "-q", "-o", "more"]
    printed("simulate", "--profile", "curve.yaml", *more, cwd=curve)
    text = printed("compare", "ladder", "more", cwd=curve)
    assert "12 of 12 comparisons inside a margin of 1%" in text
    assert "max_concurrency=2 of more" in text


def test_commands_that_choose_the_load_themselves_refuse_a_profile_that_sweeps_it(curve: Path) -> None:
    arguments = ("simulate", "sweep", "--profile", "curve.yaml", "--max-concurrency", "1,2")
    message = "--max-concurrency sets the load, and the profile sweeps max_concurrency; leave out one of the two"
    assert message in refusal(*arguments, cwd=curve, code=2)
    trace = ["--set", "sweep.max_concurrency=[4, 8]", "--keep", "summary"]
    message = "load factors max_concurrency: a trace of which only summaries are kept is replayed as it is"
    assert message in refusal("simulate", "--profile", "azure-replay", *trace, cwd=curve, code=2)


def test_blocks_are_added_to_a_ladder_and_measured_by_resume(curve: Path) -> None:
    printed("run", "curve", "--blocks", 2, "-q", "-o", "run", cwd=curve, **WITHOUT_SERVERS)
    printed("run", "--resume", "run", "--blocks", 3, "-q", cwd=curve, **WITHOUT_SERVERS)
    assert "12 of 12 runs done · 3 blocks" in printed("show", "run", cwd=curve)
