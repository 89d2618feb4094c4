"""A capacity from the command line: sizes by a pilot, a plan that states them, one answer in all outputs."""

import json
import re

import pytest
from support.cli import WITHOUT_SERVERS, benchctl, document, printed

PROFILE = {
    "blocks": 6,
    "engine": {"kind": "sim", "options": {"noise": "none", "cost_model": "roofline", "hardware": "small:60:2000"}},
    "slo": {"tpot_ms": 40, "share": 0.9},
    "primary_metrics": ["capacity_concurrency"],
    "capacity": {"smallest": 4, "largest": 32},
    "load": {"begin": "running"},
    "workload": {
        "dataset": "synthetic",
        "num_prompts": 40,
        "input_len": 128,
        "output_len": {"mean": 10, "cv": 0.3},
        "arrival": {"kind": "closed-loop", "max_concurrency": 4},
    },
    "variants": {"baseline": {}, "fast": {"server": {"hardware": "small:66:2200"}}},
}


def written(directory, **changes):
    path = directory / "carries.yaml"
    path.write_text(json.dumps(PROFILE | changes), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The directory of an experiment whose sizes a pilot found, and what was printed."""
    directory = tmp_path_factory.mktemp("capacity")
    profile = written(directory)
    output = printed("run", "--profile", profile, "--quiet", "-o", "done", cwd=directory, **WITHOUT_SERVERS)
    return directory / "done", output


@pytest.fixture(scope="module")
def shown(measured):
    """What ``show`` says of it."""
    return document("show", measured[0])


def test_a_pilot_names_the_sizes_and_counts_in_nothing(measured):
    path, output = measured
    assert "sizes of loads first: one server of each arm, results in results/carries-sizes/" in output
    profile = (path / "profile.yaml").read_text()
    assert "per_server: ladder" in profile
    assert "max_concurrency:" in profile.partition("sweep:")[2]


def test_one_capacity_is_in_table_json_page_and_verdict(measured, shown):
    path, output = measured
    compared = document("compare", path)["comparisons"][0]
    levels = {each["arm"]: each["level"] for each in shown["capacities"]}
    (metric,) = [each for each in compared["metrics"] if each["name"] == "capacity_concurrency"]
    assert (metric["a"], metric["b"]) == pytest.approx((levels["baseline"], levels["fast"]))
    assert compared["verdict"] == "improvement"
    assert [cell["cell"] for cell in compared["cells"]] == ["fast"]
    assert f"{levels['baseline']:.3g}" in output
    page = (path / "report.html").read_text()
    assert "Capacity: requests at once at which 90% keep tpot &lt;= 40 ms" in page


def test_a_resumed_experiment_keeps_the_sizes_of_its_pilot(measured, shown):
    path, _ = measured
    (arm, *_) = shown["capacities"]
    sizes = [point["size"] for point in arm["blocks"][0]["points"]]
    output = printed("run", "--resume", path, "--blocks", 7, "--dry-run")
    (ladder, *_) = re.findall(r"max_concurrency ((?:\d+, )+\d+)", output)
    assert sorted(map(int, ladder.split(", "))) == sizes
    assert "2 of 14 runs left to measure" in output


def test_a_plan_states_the_pilot_and_the_loads_of_every_server(tmp_path):
    output = printed("run", "--profile", written(tmp_path), "--dry-run", cwd=tmp_path)
    assert (
        "first the sizes of the loads, by one server of each arm, in a result directory of 'carries-sizes':"
        in output
    )
    assert "2 runs in 1 block of 2, 4 load points on each server one after the other, 40 requests each" in output
    assert "then 'carries', with sizes around the capacities there, such as these:" in output
    assert "12 runs in 6 blocks of 2, " in output
    assert "capacity: requests at once at which 90% keep tpot <= 40 ms" in output
    assert output.count("estimated duration") == 2
    assert output.count("rows in a batch on average") == 4, "a line for each server, not for each load"


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        (
            {"tpot_ms": 2},
            "baseline breaks at 4, the least that was sent: send less, or raise the limits (1 of 1 block)",
        ),
        ({"e2el_ms": 60000}, "fast holds at 32, the most that was sent: send more (1 of 1 block)"),
    ],
)
def test_an_objective_that_no_load_or_every_load_meets_ends_after_the_pilot_which_is_kept(tmp_path, slo, words):
    ended = benchctl(
        "run", "--profile", written(tmp_path, slo=slo | {"share": 0.9}), "--quiet", cwd=tmp_path, **WITHOUT_SERVERS
    )
    assert ended.returncode == 3
    assert words in " ".join(ended.stderr.split())
    assert "set capacity.smallest or capacity.largest" in " ".join(ended.stderr.split())
    assert list((tmp_path / "results" / "carries-sizes").glob("*/manifest.json"))
    assert not (tmp_path / "results" / "carries").exists()


def test_one_arm_has_a_capacity_and_no_verdict(tmp_path):
    profile = written(tmp_path, variants={"baseline": {}}, blocks=1)
    output = printed("run", "--profile", profile, "--quiet", "-o", "alone", cwd=tmp_path, **WITHOUT_SERVERS)
    assert "no verdict: only baseline was planned, so there is nothing to compare it with" not in output
    (alone,) = document("show", tmp_path / "alone")["capacities"]
    assert alone["level"] is not None
    assert "verdict" not in output.split("Capacity")[0].lower()


def test_the_rate_that_a_server_carries_lies_below_the_one_whose_backlog_grows(tmp_path):
    """Without a step above its capacity that is steady, it lies between two sizes."""
    changes = {
        "blocks": 1,
        "variants": {"baseline": {}},
        "slo": {"e2el_ms": 5000, "share": 0.9},
        "primary_metrics": ["capacity_rate"],
        "capacity": None,
        "sweep": {"request_rate": [8, 14, 30, 50]},
        "per_server": "ladder",
        "load": {"discard": 0.2},
        "workload": PROFILE["workload"] | {"num_prompts": 400, "arrival": {"kind": "poisson", "request_rate": 8}},
    }
    printed(
        "run", "--profile", written(tmp_path, **changes), "--quiet", "-o", "rate", cwd=tmp_path, **WITHOUT_SERVERS
    )
    (baseline,) = document("show", tmp_path / "rate")["capacities"]
    for block in baseline["blocks"]:
        assert block["holds"] in {14, 30}, block
        assert block["size"] < 50
    assert any(point["breaks"] for block in baseline["blocks"] for point in block["points"])


def test_loads_too_short_for_the_share_are_refused_before_anything_is_measured(tmp_path):
    workload = PROFILE["workload"] | {"num_prompts": 39}
    refused = benchctl("run", "--profile", written(tmp_path, workload=workload, slo={"tpot_ms": 40}), cwd=tmp_path)
    assert refused.returncode == 2
    words = "workload.num_prompts: is 39, and a share of 0.99 takes 299 requests in the steady window of each load"
    assert words in " ".join(refused.stderr.split())
    assert not (tmp_path / "results").exists()


def test_a_capacity_of_loads_without_sizes_is_refused_with_what_to_measure(measured):
    (pilot,) = measured[0].parent.glob("results/carries-sizes/2*")
    refused = benchctl("compare", pilot, "--metrics", "capacity_rate")
    assert refused.returncode == 2
    words = "capacity_rate needs loads of several sizes and an objective: measure with slo and sweep.request_rate"
    assert words in " ".join(refused.stderr.split())
