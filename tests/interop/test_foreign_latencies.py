"""Latencies of single requests from detailed result files: the same numbers as benchctl's own, and none guessed."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from support.cli import benchctl
from support.results.builders import write_results

from benchctl.analysis.foreign import runs_of_side
from benchctl.interop.foreign_readers import read_foreign
from benchctl.interop.foreign_values import detailed_latencies

WRITTEN = Path(__file__).parent / "foreign"


@pytest.fixture(scope="module", name="results")
def _results(tmp_path_factory):
    return write_results(tmp_path_factory.mktemp("results"), num_requests=8, n=1)


@pytest.mark.parametrize("form", ["vllm", "aiperf"])
def test_an_exported_run_gives_the_latencies_of_its_result_directory_again(results, tmp_path, form):
    exported = tmp_path / form
    done = benchctl("export", results.path, "--format", form, "-o", exported)
    assert done.returncode == 0, done.stderr
    ours = runs_of_side(f"{results.path}:baseline", allow_suspect=False)
    theirs = read_foreign(str(exported / "baseline"))
    assert len(theirs) == len(ours)
    for own, read in zip(ours, theirs, strict=True):
        assert set(read.latencies_ms) == {"ttft", "tpot", "itl", "e2el"}
        for latency, values in own.latencies_ms.items():
            assert sorted(read.latencies_ms[latency]) == pytest.approx(sorted(values), rel=1e-6)


def test_the_latencies_of_a_guidellm_report_have_the_means_of_its_metrics():
    (run,) = read_foreign(str(WRITTEN / "guidellm.json"))
    for latency in ("ttft", "tpot", "e2el"):
        assert len(run.latencies_ms[latency]) == 12
        assert fmean(run.latencies_ms[latency]) == pytest.approx(run.metrics[f"{latency}_ms"])
    assert "itl" not in run.latencies_ms


@pytest.mark.parametrize("name", ["vllm-0.json", "profile_export_aiperf.json"])
def test_a_file_without_single_requests_has_no_latencies(name):
    (run,) = read_foreign(str(WRITTEN / name))
    assert run.latencies_ms == {}


def test_a_request_that_failed_or_has_no_number_of_tokens_is_left_out_where_it_must_be():
    document = {
        "ttfts": [0.01, 0.0, 0.02, 0.03],
        "itls": [[0.005, 0.007], [], [0.004, 0.004], [0.001]],
        "output_lens": [3, 0, None, 2],
        "errors": ["", "", "", "timed out"],
    }
    read = detailed_latencies(document, has_itl=True)
    assert read["ttft"] == pytest.approx((10, 20))
    assert read["tpot"] == pytest.approx((6,))
    assert read["e2el"] == pytest.approx((22, 28))
    assert read["itl"] == pytest.approx((5, 7, 4, 4))
    assert "itl" not in detailed_latencies(document, has_itl=False)


@pytest.mark.parametrize(
    "document", [{}, {"ttfts": [0.1], "itls": []}, {"ttfts": "0.1", "itls": [[]]}, {"ttfts": [-1.0], "itls": [[]]}]
)
def test_lists_that_do_not_fit_together_are_no_latencies(document):
    assert detailed_latencies(document, has_itl=True) == {}


def test_lines_of_requests_beside_an_aiperf_export_that_are_cut_short_do_not_count(tmp_path):
    (tmp_path / "profile_export_aiperf.json").write_text((WRITTEN / "profile_export_aiperf.json").read_text())
    line = json.dumps({"metrics": {"time_to_first_token": {"value": 12_000, "unit": "us"}}})
    failed = json.dumps({"metrics": {"time_to_first_token": {"value": 1, "unit": "s"}}, "error": {"code": 500}})
    (tmp_path / "profile_export.jsonl").write_text(f"{line}\n{failed}\n{line[:20]}\n")
    (run,) = read_foreign(str(tmp_path))
    assert run.latencies_ms == {"ttft": (12.0,)}
