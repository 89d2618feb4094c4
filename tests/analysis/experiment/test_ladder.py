"""The prices on a ladder of controls: differences of neighbours, paired by block, which add up."""

import json
import math

import pytest
from support.cli import benchctl
from support.results.builders import edit_run
from support.results.comparing import compare

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.attribution.estimate import logarithmic_mean
from benchctl.analysis.experiment.ladder import describe_difference
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import ResultDirectory
from benchctl.report.experiment_tables import ladder_table
from benchctl.report.export import write_report

OVERRIDES = (
    "sweep.value_model=[qwen2.5-0.5b, qwen2.5-1.5b]",
    "workload.num_prompts=2",
    "workload.samples_per_prompt=2",
    "workload.output_len=8",
)


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory):
    """Two blocks of the profile ``controls`` over two value models, in virtual time."""
    path = tmp_path_factory.mktemp("ladder") / "r"
    words = [word for override in OVERRIDES for word in ("--set", override)]
    simulated = benchctl("simulate", "--profile", "controls", "--blocks", 2, "--jobs", 1, *words, "-o", path)
    assert simulated.returncode == 0, simulated.stdout + simulated.stderr
    return path


def test_prices_add_up_to_the_whole_in_every_cell_which_is_what_compare_says_of_its_two_ends(path):
    ladders = analyze_directory(path).ladders
    assert [ladder.label for ladder in ladders] == [
        "guided value_model=qwen2.5-0.5b",
        "guided value_model=qwen2.5-1.5b",
    ]
    compared = compare(f"{path}:baseline", f"{path}:guided", metrics=("step_ms", "wall_s"))
    for ladder in ladders:
        assert ladder.num_blocks == 2
        (cell,) = [cell for cell in compared.cells if ladder.label.endswith(cell.label)]
        for metric in cell.deciding:
            quantity, whole = metric.metric.name, ladder.whole.differences[metric.metric.name]
            parts = [price.differences[quantity].mean for price in ladder.prices]
            assert math.isclose(math.fsum(parts), whole.mean, rel_tol=1e-9)
            assert whole.mean == pytest.approx(metric.b - metric.a, rel=1e-12)
            half = metric.estimate.half_width * logarithmic_mean(metric.a, metric.b)
            assert whole.half_width == pytest.approx(half, rel=1e-12)
    assert {metric.metric.name for metric in cell.deciding} == {"step_ms", "wall_s"}


def test_each_step_is_named_by_what_it_changes_and_stands_in_its_own_cell_table_and_summary(path):
    analysis = analyze_directory(path)
    prices = analysis.ladders[1].prices
    assert [(price.what, price.upper) for price in prices] == [
        ("flags", "guided-flags"),
        ("idle code", "guided-idle value_model=qwen2.5-1.5b"),
        ("sampling + value-model compute", "guided-neutral value_model=qwen2.5-1.5b"),
        ("changed tokens", "guided value_model=qwen2.5-1.5b"),
    ]
    compute = prices[2].differences["step_ms"].mean
    assert compute > 5 * max(abs(p.differences["step_ms"].mean) for p in prices if p is not prices[2])
    names = [row["what"] for row in ladder_table(analysis).rows]
    assert names == [*(price.what for price in prices), "all of it"] * 2
    write_report(path)
    stored = json.loads((path / "summary.json").read_text())["ladders"]
    assert [ladder["label"] for ladder in stored] == [ladder.label for ladder in analysis.ladders]
    settings = variant_settings(load_profile("aa"), "again", {})
    assert describe_difference(settings, settings) == "nothing"
    assert describe_difference(None, settings) == "unknown"


def test_a_block_with_an_unusable_step_takes_no_part(path):
    results = ResultDirectory(path)
    flags = next(run.path.name for run in results.runs() if run.path.name.endswith("b1-guided-flags"))
    edit_run(results, flags, state="suspect")
    ladders = analyze_directory(path).ladders
    edit_run(results, flags, state="done")
    assert [ladder.num_blocks for ladder in ladders] == [1, 1]
    assert ladders[0].whole.differences["wall_s"].half_width is None
