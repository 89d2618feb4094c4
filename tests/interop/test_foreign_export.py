"""``benchctl export``: what other tools would have written, and what our own readers make of it again."""

import csv
import json
import subprocess

import msgspec
import pytest
from support.results.builders import edit_requests, edit_run, write_results
from support.servers.real_engines import needs, tiny_model, turn_of
from support.servers.simulator import sim_server
from typer.testing import CliRunner

from benchctl.analysis.foreign import runs_of_side
from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.metrics.table import METRICS
from benchctl.cli.app import app
from benchctl.engines.environment import engines_directory
from benchctl.errors import RecordError
from benchctl.interop.foreign_readers import read_foreign
from benchctl.records.loaded import load_results
from benchctl.records.record import RequestError

PUBLISHED_COLUMNS = [
    "achieved_tflops_per_s",
    "base_pflops_attention",
    "base_pflops_decode",
    "base_pflops_linear",
    "base_pflops_lm_head",
    "base_pflops_prefill",
    "base_pflops_total",
    "batch_size_mean",
    "batch_size_p50",
    "batch_size_p95",
    "latency_s_mean",
    "latency_s_p95",
    "lvm_pflops_candidates",
    "lvm_pflops_extend",
    "lvm_pflops_prefill",
    "lvm_pflops_total",
    "n_requests",
    "n_steps",
    "n_steps_with_lvm",
    "output_tokens_mean",
    "output_tokens_p95",
    "tag",
    "theoretical_gflops_per_output_token",
    "theoretical_pflops_total",
    "throughput_output_tokens_per_s",
    "top_k",
    "total_output_tokens",
    "total_prompt_tokens",
    "value_scale",
    "wall_clock_s",
]
TIMED = [
    "sampler_total",
    "pre_lvm",
    "lvm_apply_outer",
    "lvm_build_pending",
    "lvm_forward",
    "lvm_apply_guidance",
    "sample",
]


def export(results, form, out):
    return CliRunner().invoke(app, ["export", str(results.path), "--format", form, "-o", str(out)])


@pytest.mark.parametrize("form", ["vllm", "aiperf"])
@pytest.mark.parametrize("choices", [1, 2])
def test_an_export_read_again_gives_the_same_numbers(tmp_path, form, choices):
    results = write_results(tmp_path / "r", num_requests=40, n=choices)
    assert export(results, form, tmp_path / "out").exit_code == 0
    for arm, variant in (("baseline", "baseline"), ("guided-top_k5", "guided")):
        exported = read_foreign(str(tmp_path / "out" / arm))
        side = runs_of_side(f"{results.path}:{variant}", allow_suspect=False)
        ours = [run for run in load_results(results.path).runs if run.record.variant == variant]
        for run, own, single in zip(exported, map(run_metrics, ours), side, strict=True):
            assert run.source == form
            assert run.metrics.keys() >= {"tpot_ms", "ttft_ms", "itl_ms", "e2el_ms", "wall_s", "p90_ttft_ms"}
            assert run.metrics == pytest.approx({name: own[name] for name in run.metrics})
            assert dict(run.load_point) == {"request_rate": "inf", "max_concurrency": 4}
            assert run.settings["model_id"] == "qwen2.5-7b"
            for latency, values in single.latencies_ms.items() if choices == 1 else ():
                assert sorted(run.latencies_ms[latency]) == pytest.approx(sorted(values), rel=1e-6)


def test_exports_of_two_arms_are_compared_like_any_files(tmp_path):
    blocks = tuple({"baseline": 1 + 0.002 * i, "guided": 1 + 0.003 * i} for i in range(6))
    assert export(write_results(tmp_path / "r", block_factors=blocks), "aiperf", tmp_path).exit_code == 0
    sides = [str(tmp_path / "baseline"), str(tmp_path / "guided-top_k5")]
    done = CliRunner().invoke(app, ["compare", *sides])
    assert done.exit_code == 1
    assert done.stdout.startswith("regression: guided-top_k5 against baseline")


def test_an_aiperf_export_has_a_line_for_each_request_failed_ones_too_on_the_wall_clock_where_it_is_known(tmp_path):
    results = write_results(tmp_path / "r", n=1)
    error = RequestError(kind="http-status", message="busy", status=503)
    edit_requests(
        results, "000-b0-baseline", lambda r: msgspec.structs.replace(r, error=error) if r.index == 1 else r
    )
    offset = {"t_ns": 0, "realtime_less_monotonic_ns": 10**18}
    sample = {"t_ns": 0, "loop_lag_ns": 0, "cpu_ns": 0, "num_open": 0, "offset": offset}
    (results.run("000-b0-baseline").path / "client.jsonl").write_text(json.dumps(sample) + "\n")
    edit_run(results, "000-b0-baseline", state="done")
    export(results, "aiperf", tmp_path / "out")
    folder = tmp_path / "out" / "baseline" / "000-b0-baseline"
    first, failed, *others = map(json.loads, (folder / "profile_export.jsonl").read_text().splitlines())
    sent_ns = load_results(results.path).runs[0].requests[0].sent_ns
    assert (first["metadata"]["request_start_ns"], first["error"], len(others)) == (sent_ns + 10**18, None, 2)
    assert failed["error"] == {"code": 503, "type": "http-status", "message": "busy"}
    assert set(failed["metrics"]) == {"error_isl"}
    assert first["metrics"]["time_to_first_token"] == {"value": pytest.approx(10), "unit": "ms"}
    summary = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert summary["error_summary"] == [{"error_details": failed["error"], "count": 1}]
    assert summary["request_latency"]["count"] == 3
    assert read_foreign(str(folder))[0].failure == "1 of 4 requests failed"


def test_damage_is_told_after_the_rest_is_written_and_a_directory_without_a_finished_run_is_refused(tmp_path):
    results = write_results(tmp_path / "r")
    path = results.run("000-b0-baseline").path / "requests.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert isinstance(export(results, "vllm", tmp_path / "out").exception, RecordError)
    assert len(list((tmp_path / "out").rglob("*.json"))) == 5
    for run in results.runs():
        edit_run(results, run.path.name, state="failed")
    refused = export(results, "vllm", tmp_path / "none")
    assert isinstance(refused.exception, RecordError)
    assert "no run is finished and whole" in str(refused.exception)


ONLY_VLLM_S = {"max_output_tokens_per_s", "max_concurrent_requests", "queue_times", "rtfx"}
"""Of each second, of the client's own queue, and of audio: nothing here has them."""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.real_engine
@needs("vllm")
def test_vllm_s_client_writes_the_keys_that_we_write_and_read(tmp_path):
    argv = [str(engines_directory() / "vllm" / "bin" / "vllm"), "bench", "serve", "--backend", "openai"]
    argv += ["--endpoint", "/v1/completions", "--model", "qwen2.5-0.5b", "--dataset-name", "random"]
    argv += ["--tokenizer", str(tiny_model(tmp_path)), "--random-input-len", "8", "--random-output-len", "4"]
    argv += ["--ignore-eos", "--num-prompts", "3", "--save-result", "--result-dir", str(tmp_path)]
    argv += ["--result-filename", "theirs.json", "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"]
    with turn_of("vllm"), sim_server(tmp_path / "sim", model="qwen2.5-0.5b") as server:
        argv += ["--base-url", str(server.client.base_url)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads((tmp_path / "theirs.json").read_text())
    export(write_results(tmp_path / "r"), "vllm", tmp_path / "out")
    ours = json.loads(next((tmp_path / "out" / "baseline").glob("*.json")).read_text())
    assert set(theirs) - ONLY_VLLM_S <= set(ours)
    (run,) = read_foreign(str(tmp_path / "theirs.json"))
    assert (run.source, run.failure, run.metrics["output_tokens"]) == ("vllm", None, 12)
    assert set(run.metrics) <= set(METRICS)


def test_a_lenvm_export_has_every_published_column_and_a_row_per_run(tmp_path):
    results = write_results(tmp_path / "r", num_requests=4, output_tokens=8, n=2)
    assert export(results, "lenvm", tmp_path / "out").exit_code == 0
    rows = list(csv.DictReader((tmp_path / "out" / "summary.csv").read_text().splitlines()))
    timed = [f"t_{name}_ms_{what}" for name in TIMED for what in ("mean", "p50", "p95", "sum", "count")]
    assert sorted(rows[0]) == sorted([*PUBLISHED_COLUMNS, *timed])
    assert [row["tag"] for row in rows] == [run.record.variant for run in load_results(results.path).runs]
    guided = next(row for row in rows if row["tag"] == "guided")
    expected = {"wall_clock_s": 8 * 15.5e-3, "latency_s_mean": 8 * 15.5e-3, "t_lvm_forward_ms_sum": 32.0}
    expected |= {"n_requests": 4, "n_steps": 8, "total_output_tokens": 64}
    assert {name: float(guided[name]) for name in expected} == pytest.approx(expected)
