"""The decomposition as people and programs get it, and from a real experiment on the simulator."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import benchctl
from support.results.builders import write_results
from support.results.decomposition_laws import assert_exact

from benchctl.analysis.attribution.work import NO_PEAKS, NO_SETTINGS, deployment_of, floor_of
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.costs.hardware import hardware_for
from benchctl.errors import UsageError
from benchctl.profile.load import profile_from_plain
from benchctl.profile.planning import variant_settings
from benchctl.records.columns import columns_from
from benchctl.records.schema import StepRecord

DECODE = {"num_prefill_tokens": 0, "num_decode_tokens": 1, "context_tokens": 100}
BLOCKS = tuple({"baseline": 1 + 0.004 * i, "guided": 1.02 - 0.003 * i} for i in range(6))


@pytest.fixture(name="sides", scope="module")
def _sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = write_results(tmp_path_factory.mktemp("decomposition") / "r", block_factors=BLOCKS).path
    return f"{path}:baseline", f"{path}:guided"


def rows_below(text: str, heading: str) -> list[list[str]]:
    """Fields of the lines of the table whose heading holds ``heading``; fields stand two blanks apart."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if heading in line) + 1
    table = lines[start : lines.index("", start)]
    return [[field.strip() for field in line.split("  ") if field.strip()] for line in table]


def test_compare_prints_factors_seconds_and_the_largest_sections(sides: tuple[str, str]) -> None:
    rows = rows_below(benchctl("compare", *sides).stdout, "where the time went")
    assert [row[0] for row in rows] == [
        "top_k=5",
        "steps",
        "time per step",
        "lvm_build_pending",
        "lvm_forward",
        "lvm_apply_guidance",
        "remainder",
    ]
    assert rows[0][1:] == ["wall time", "80.8 ms", "125.5 ms", "x1.554 [1.530, 1.578]", "+44.8 ms"]
    assert rows[2] == ["time per step", "x1.554 [1.530, 1.578]", "+44.8 ms", "100%"]
    assert rows[4] == ["lvm_forward", "0 ms", "4.05 ms", "+4.05 ms [+4.03, +4.07]", "72% of the step"]


def test_all_shows_the_model_of_the_work(sides: tuple[str, str]) -> None:
    names = {row[0] for row in rows_below(benchctl("compare", *sides, "--all").stdout, "where the time went")}
    assert names >= {"value model's FLOPs and bytes", "rest"}


def test_markdown_has_the_table_of_factors(sides: tuple[str, str]) -> None:
    text = benchctl("compare", *sides, "--markdown").stdout
    assert "| cell | where the time went | baseline | guided | factor (95% CI) | adds | share |" in text
    assert "| &nbsp;&nbsp;time per step |" in text


def test_json_adds_up_for_whoever_reads_it(sides: tuple[str, str]) -> None:
    (cell,) = json.loads(benchctl("compare", *sides, "--json").stdout)["cells"]
    found = cell["decomposition"]
    wall = found["wall"]
    assert math.prod(factor["ratio"] for factor in wall["factors"]) == pytest.approx(wall["ratio"])
    assert wall["a_s"] + sum(factor["added_s"] for factor in wall["factors"]) == pytest.approx(wall["b_s"])
    for split in (found["sections"], found["work"]):
        assert sum(part["added_s"] for part in split["parts"]) == pytest.approx(split["whole"]["added_s"])
    assert found["work"]["model"] == "roofline of h100-sxm"
    assert found["sentence"].startswith("time per step carries 100 % of the +55%")


def test_a_real_experiment_with_natural_lengths_is_divided_exactly(tmp_path: Path) -> None:
    """Guidance that shortens answers and slows steps, on a real server process with real streams."""
    small = ["workload.num_prompts=4", "workload.max_tokens=400", "engine.options.time_scale=60"]
    settings = [argument for setting in small for argument in ("--set", setting)]
    done = benchctl("run", "--profile", "natural", "--blocks", 2, "-q", "--output-dir", tmp_path, *settings)
    (path,) = (manifest.parent for manifest in tmp_path.glob("natural/2*/manifest.json"))
    options = CompareOptions(allow_suspect=True, allow=("*",))
    (cell,) = compare_sides(parse_side(f"{path}:baseline"), parse_side(f"{path}:guided"), options).cells
    found = cell.decomposition
    assert found is not None, done.stderr
    assert_exact(found)
    factors = {factor.name: factor.estimate.ratio for factor in found.wall.parts}
    assert list(factors) == ["output tokens", "steps per token", "time per step", "remainder"]
    assert factors["output tokens"] < 1 < factors["time per step"]


@pytest.mark.parametrize(
    ("model", "device", "reason"),
    [
        ("no-such-model", "h100-sxm", "the shape of a model is unknown: unknown model 'no-such-model'"),
        ("qwen2.5-7b", None, NO_PEAKS),
        (None, "h100-sxm", NO_SETTINGS),
    ],
)
def test_work_without_shapes_or_peaks_is_unknown_for_a_reason(
    model: str | None, device: str | None, reason: str
) -> None:
    settings = None
    if model is not None:
        workload = {"dataset": "generated", "num_prompts": 1, "arrival": {"kind": "burst"}}
        document = {"name": "p", "engine": {"kind": "sim"}, "workload": workload, "variants": {"baseline": {}}}
        settings = variant_settings(profile_from_plain(document | {"model": "qwen2.5-7b"}, "test"), "baseline", {})
        settings = settings.model_copy(update={"model": model})
    with pytest.raises(UsageError, match=re.escape(reason)):
        deployment_of(settings, None if device is None else hardware_for(device))


def test_devices_that_share_each_layer_count_as_one_with_the_sum_of_their_peaks() -> None:
    workload = {"dataset": "generated", "num_prompts": 1, "arrival": {"kind": "burst"}}
    engine = {"kind": "vllm", "options": {"tensor_parallel_size": 4}}
    document = {"name": "p", "model": "qwen2.5-7b", "engine": engine, "workload": workload}
    profile = profile_from_plain(document | {"variants": {"baseline": {}}}, "test")
    one = hardware_for("h100-sxm")
    four = deployment_of(variant_settings(profile, "baseline", {}), one)
    step = StepRecord(step=0, start_ns=0, dur_ns=1, clock="host", phase="decode", num_seqs=1, **DECODE)
    of_four, of_one = (floor_of(columns_from([step]), each) for each in (four, replace(four, tensor_parallel=1)))
    assert of_four.hardware == "4 x h100-sxm"
    assert of_four.total_s == pytest.approx(of_one.total_s / 4)
