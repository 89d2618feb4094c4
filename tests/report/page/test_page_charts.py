"""The charts of the report page: specifications whose numbers are those of the analysis, or a reason for none."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.results.builders import T0_NS, edit_manifest, edit_requests, edit_run, edit_steps, write_results

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.records.record import RequestError
from benchctl.records.schema import GpuInfo, GpuSample, HostSample
from benchctl.records.stores import MetricNoise
from benchctl.report.charts.figure import SERIES, chart_bytes, picture_bytes, rounded, wrapped
from benchctl.report.page.page import draw_charts

EXAMPLE = Path(__file__).parent.parent.parent.parent / "results" / "example"
SWEEP = tuple({"top_k": k} for k in (1, 2, 5))
IDS = (
    "block-values",
    "sweep",
    "sections",
    "step-time",
    "step-time-by-batch-size",
    "request-timeline",
    "gpu",
    "host-cpu",
)
SPREAD = ({"baseline": 1.0, "guided": 1.0}, {"baseline": 1.1, "guided": 1.2}, {"baseline": 0.9, "guided": 1.0})


def charts_of(path, *comparisons):
    return {chart.id: chart for chart in draw_charts(analyze_directory(path), comparisons)}


def rows_of(chart, **having):
    rows = chart.spec["datasets"]["rows"]
    return [row for row in rows if all(row[name] == value for name, value in having.items())]


def values_of(chart, name, **having):
    return [row[name] for row in rows_of(chart, **having)]


def titles_of(chart):
    return [panel["encoding"]["y"]["title"] for panel in chart.spec["vconcat"]]


def x_axis_of(chart):
    return chart.spec["vconcat"][-1]["encoding"]["x"]


def layers_of(chart, mark):
    layers = [layer for panel in chart.spec["vconcat"] for layer in panel["layer"]]
    return [layer for layer in layers if layer["mark"]["type"] == mark]


def half_the_batch(results):
    """Every second step of each run has half as many sequences."""
    for run in results.runs():
        edit_steps(
            results,
            run.path.name,
            lambda step: msgspec.structs.replace(
                step, num_seqs=step.num_seqs // 2 if step.step % 2 else step.num_seqs
            ),
        )


def samples(results, *, devices=1, count=20):
    """GPU and host samples in each run, over its 0.15 s of load and a second beyond it on both sides."""
    for run in results.runs():
        for i in range(-1, count + 1):
            inside_ns = T0_NS + round(i * 100_000_000 / count)
            t_ns = T0_NS - 10**9 if i < 0 else inside_ns if i < count else T0_NS + 10**9
            with run.append("gpu") as writer:
                for device in range(devices):
                    writer.write(
                        GpuSample(
                            t_ns=t_ns,
                            index=device,
                            source="nvml",
                            power_w=100.0 + i,
                            sm_clock_hz=1_980_000_000,
                            utilization_frac=0.5,
                        )
                    )
            with run.append("host") as writer:
                writer.write(HostSample(t_ns=t_ns, server_cpu_cores=1.5, client_cpu_cores=0.25))


@pytest.fixture(name="swept")
def _swept(tmp_path):
    results = write_results(tmp_path / "r", cells=SWEEP, block_factors=SPREAD)
    samples(results, devices=2)
    half_the_batch(results)
    return results


def test_every_chart_of_a_whole_directory_is_drawn(swept):
    charts = charts_of(swept.path)
    assert [chart for chart in charts if chart in IDS] == list(IDS)  # more may join them
    assert {chart.id: chart.skipped for chart in charts.values() if chart.skipped} == {}


@pytest.mark.parametrize("chart_id", IDS)
def test_a_specification_is_valid_to_vega_lite_and_json_can_hold_it(swept, chart_id, capfd):
    chart = charts_of(swept.path)[chart_id]
    assert json.loads(json.dumps(chart.spec, allow_nan=False)) == chart.spec
    drawn = chart_bytes(chart, ".svg").decode()
    assert drawn.startswith("<svg")
    assert drawn.count("<path") > 10
    assert chart.title in drawn


@pytest.mark.parametrize("chart_id", IDS)
def test_every_channel_names_a_field_of_its_rows(swept, chart_id):
    spec = charts_of(swept.path)[chart_id].spec
    for panel in spec["vconcat"]:
        for layer in panel["layer"]:
            if "values" in layer.get("data", {}):
                continue
            rows = spec["datasets"][layer.get("data", spec["data"])["name"]]
            inherited = {
                name: channel for name, channel in panel["encoding"].items() if name not in layer["encoding"]
            }
            channels = {**inherited, **layer["encoding"]}
            if "data" in layer:
                channels.pop("color", None)
            fields = {
                channel["field"]
                for channel in channels.values()
                if isinstance(channel, dict) and "field" in channel
            }
            assert fields <= set().union(*rows), layer


@pytest.mark.parametrize("chart_id", IDS)
def test_every_axis_says_what_it_shows(swept, chart_id):
    chart = charts_of(swept.path)[chart_id]
    assert x_axis_of(chart)["title"]
    if chart_id != "sections":  # its labels are names of arms
        assert all(titles_of(chart))


def test_no_chart_sets_what_belongs_to_the_theme_of_the_page(swept):
    for chart in charts_of(swept.path).values():
        config = json.dumps(chart.spec["config"])
        assert "olor" not in config
        assert '"font"' not in config
        assert not {"background", "width", "title"} & set(chart.spec)
        assert not any("width" in panel for panel in chart.spec["vconcat"])


def test_an_arm_has_the_same_colour_in_every_chart(swept):
    seen = {}
    for chart_id in ("block-values", "step-time", "step-time-by-batch-size", "host-cpu", "latencies"):
        for panel in charts_of(swept.path)[chart_id].spec["vconcat"]:
            scale = panel["encoding"]["color"]["scale"]
            for arm, color in zip(scale["domain"], scale["range"], strict=True):
                seen.setdefault(arm, set()).add(color)
    assert len(seen) == 4  # arms
    assert seen["baseline"] == {SERIES[0]}
    assert all(len(colors) == 1 for colors in seen.values())


def test_the_example_of_a_simulator_gives_charts_that_agree_with_its_summary():
    analysis = analyze_directory(EXAMPLE)
    charts = {chart.id: chart for chart in draw_charts(analysis)}
    for cell in analysis.cells:
        parts = values_of(charts["sections"], "value", bar=wrapped(cell.label))
        assert math.fsum(parts) == pytest.approx(cell.centre("step_ms"), rel=1e-5)
        ends = [
            row["end"] for row in charts["sections"].spec["datasets"]["ends"] if row["bar"] == wrapped(cell.label)
        ]
        assert ends == [pytest.approx(math.fsum(parts), rel=1e-5)]
    assert charts["step-time-by-batch-size"].skipped == "every decode step has 4 sequences: see step_ms"


def test_the_steps_of_all_batch_sizes_add_up_to_those_of_the_arm(swept):
    analysis = analyze_directory(swept.path)
    charts = {chart.id: chart for chart in draw_charts(analysis)}
    for cell in analysis.cells:
        rows = rows_of(charts["step-time-by-batch-size"], arm=cell.label)
        in_phase = [run.run.columns.in_phase("decode") for run in cell.runs]
        assert sum(row["steps"] for row in rows) == sum(int(mask.sum()) for mask in in_phase)
        total = sum(run.run.columns.dur_ns[mask].sum() / 1e6 for run, mask in zip(cell.runs, in_phase, strict=True))
        assert math.fsum(row["mean"] * row["steps"] for row in rows) == pytest.approx(total, rel=1e-5)


def test_the_course_of_a_run_keeps_the_mean_and_the_number_of_its_steps():
    analysis = analyze_directory(EXAMPLE)
    chart = next(chart for chart in draw_charts(analysis) if chart.id == "step-time")
    assert list(dict.fromkeys(values_of(chart, "block"))) == ["0", "1", "2", "3", "4", "5"]
    for cell in analysis.cells:
        for run in cell.runs:
            rows = rows_of(chart, arm=cell.label, block=str(run.record.block))
            count = sum(row["steps"] for row in rows)
            assert count == run.number("num_steps")
            mean = math.fsum(row["mean"] * row["steps"] for row in rows) / count
            assert mean == pytest.approx(run.number("step_ms"), rel=1e-5)
            assert all(row["low"] <= row["median"] <= row["high"] for row in rows)


def test_the_raw_value_of_every_run_stands_in_its_block(swept):
    analysis = analyze_directory(swept.path)
    chart = next(chart for chart in draw_charts(analysis) if chart.id == "block-values")
    for name in ("step_ms", "tpot_ms", "wall_s"):
        for cell in analysis.cells:
            rows = rows_of(chart, arm=cell.label, metric=name)
            shown = {row["run"]: (row["block"], row["value"]) for row in rows}
            assert shown == {
                run.record.run_id: (run.record.block, pytest.approx(run.number(name), rel=1e-5))
                for run in cell.runs
            }


def test_a_block_that_stands_out_is_open_and_one_that_is_left_out_is_crossed(tmp_path):
    factors = [{"baseline": 1.0, "guided": 1.0 + 0.002 * b} for b in range(9)]
    factors[4]["guided"] = 3.0
    results = write_results(tmp_path / "r", block_factors=factors)
    edit_run(results, results.plan().runs[-1].run_id, state="suspect")
    sides = [parse_side(f"{results.path}:{variant}") for variant in ("baseline", "guided")]
    chart = charts_of(results.path, compare_sides(*sides, CompareOptions()))["block-values"]
    rows = {row["block"]: row for row in rows_of(chart, arm="guided top_k=5", metric="step_ms")}
    assert {block: row["kind"] for block, row in rows.items() if row["kind"] != "counted"} == {
        4: "outlier",
        8: "left out",
    }
    assert "left out: suspect" in rows[8]["note"]
    joints, points = (layers_of(chart, mark)[0] for mark in ("line", "point"))
    assert joints["transform"] == [
        {"filter": "datum.kind !== 'left out'"}
    ]  # nothing is joined to what does not count
    assert points["encoding"]["fillOpacity"]["value"] == 0
    assert points["encoding"]["shape"]["scale"]["domain"] == ["counted", "outlier", "left out"]


def test_arms_that_lie_far_apart_are_shown_in_per_cent_of_their_own_mean(tmp_path):
    near = write_results(tmp_path / "near", block_factors=SPREAD)
    far = write_results(
        tmp_path / "far", block_factors=[{"baseline": f["baseline"], "guided": 9 * f["guided"]} for f in SPREAD]
    )
    chart = charts_of(near.path)["block-values"]
    assert "per cent" not in chart.caption
    assert {layer["encoding"]["y"]["field"] for layer in layers_of(chart, "point")} == {"value"}
    chart = charts_of(far.path)["block-values"]
    assert "per cent" in chart.caption
    assert {layer["encoding"]["y"]["field"] for layer in layers_of(chart, "point")} == {"percent"}
    mean = (9 * 9 * 1.2 * 9) ** (1 / 3) / 9
    shown = values_of(chart, "percent", arm="guided top_k=5", metric="step_ms")
    assert shown == pytest.approx([100 * (f / mean - 1) for f in (1.0, 1.2, 1.0)], abs=1e-3)


def test_the_sweep_shows_the_ratio_interval_and_blocks_of_every_cell(swept):
    analysis = analyze_directory(swept.path)
    chart = next(chart for chart in draw_charts(analysis) if chart.id == "sweep")
    rows = rows_of(chart, line="guided", quantity="wall", kind="estimate")
    estimates = [row.estimates["wall"] for row in analysis.sweep]
    assert [row["x"] for row in rows] == [1.0, 2.0, 5.0]
    for name, values in (("ratio", "ratio"), ("low", "ci_low"), ("high", "ci_high"), ("blocks", "num_blocks")):
        assert [row[name] for row in rows] == pytest.approx([getattr(e, values) for e in estimates], rel=1e-5)
    assert len(rows_of(chart, line="guided", quantity="wall", kind="block")) == 9


def bands_of(chart):
    """Ends of the grey bands around 1."""
    encodings = [layer["encoding"] for layer in layers_of(chart, "rect")]
    return [(encoding["y"]["datum"], encoding["y2"]["datum"]) for encoding in encodings]


def test_the_grey_band_is_the_noise_floor_where_one_is_known(swept):
    floor = MetricNoise(log_sd=0.01, num_blocks=8, floor_frac=0.05)
    sides = [parse_side(f"{swept.path}:{variant}") for variant in ("baseline", "guided")]
    options = CompareOptions(noise={"wall_s": floor, "step_ms": floor})
    known = charts_of(swept.path, compare_sides(*sides, options))["sweep"]
    assert bands_of(known) == [pytest.approx((1 / 1.05, 1.05))] * 2
    assert "A/A" in known.caption
    own = charts_of(swept.path)["sweep"]
    logs = [math.log(factor["baseline"]) for factor in SPREAD]
    assert math.log(bands_of(own)[0][1]) == pytest.approx(np.std(logs, ddof=1), rel=1e-6)


def test_several_factors_give_a_line_for_each_value_of_the_others(tmp_path):
    cells = [{"top_k": k, "value_model": m} for k in (2, 5, 40) for m in ("small", "large")]
    chart = charts_of(write_results(tmp_path / "r", cells=cells).path)["sweep"]
    for model in ("small", "large"):
        line = f"guided value_model={model}"
        assert values_of(chart, "x", line=line, quantity="wall", kind="estimate") == [2.0, 5.0, 40.0]
    assert x_axis_of(chart)["scale"]["type"] == "log"


def test_factors_that_are_words_stand_side_by_side_and_are_not_joined(tmp_path):
    cells = [{"value_model": m} for m in ("small", "large")]
    chart = charts_of(write_results(tmp_path / "r", cells=cells).path)["sweep"]
    assert x_axis_of(chart)["type"] == "nominal"
    assert sorted(x_axis_of(chart)["sort"]) == ["large", "small"]
    assert not layers_of(chart, "line")
    assert any(layer["encoding"]["y"] == {"field": "low"} for layer in layers_of(chart, "rule"))


def test_gpu_and_host_are_shown_between_first_send_and_last_output_only(swept):
    charts = charts_of(swept.path)
    for chart_id in ("gpu", "host-cpu"):
        times = values_of(charts[chart_id], "time")
        assert min(times) >= 0
        assert max(times) < 0.2
    assert set(values_of(charts["gpu"], "device", arm="baseline")) == {"GPU 0", "GPU 1"}
    # no panel for what nobody reported
    assert titles_of(charts["gpu"]) == ["power, W", "SM clock, MHz", "utilisation, %"]
    assert set(values_of(charts["host-cpu"], "value", quantity="server CPU, cores")) == {1.5}


def test_a_request_that_failed_is_crossed_in_the_timeline(tmp_path):
    results = write_results(tmp_path / "r", num_requests=6)
    broken = RequestError(kind="reset", message="connection reset")

    def fail(request):
        if request.index != 2:
            return request
        return msgspec.structs.replace(request, error=broken, choices=(), done_ns=None)

    edit_requests(results, results.plan().runs[0].run_id, fail)
    chart = charts_of(results.path)["request-timeline"]
    rows = rows_of(chart, block="0", is_first=True)
    assert [(row["row"], row["id"], row["error"]) for row in rows if row["error"]] == [(3, "r00002", "reset")]
    assert [row["row"] for row in rows if row["first"] is not None] == [1, 2, 4, 5, 6]
    assert all(row["waited"] == row["first"] for row in rows if row["first"] is not None)
    assert layers_of(chart, "point")[0]["transform"] == [{"filter": "isValid(datum.error)"}]


def test_of_many_requests_two_hundred_are_shown_and_the_caption_says_so(tmp_path):
    results = write_results(tmp_path / "r", num_requests=450, output_tokens=2, n=1)
    chart = charts_of(results.path)["request-timeline"]
    rows = values_of(chart, "row", block="0", is_first=True)
    assert (len(rows), rows[0], rows[-1]) == (200, 1, 450)
    assert len(set(rows)) == 200
    assert "200 of up to 450" in chart.caption


def test_a_directory_without_logs_and_devices_says_of_each_chart_what_is_missing(tmp_path):
    results = write_results(tmp_path / "r")
    for run in results.runs():
        (run.path / "steps.jsonl").unlink()
    reasons = {chart.id: chart.skipped for chart in charts_of(results.path).values()}
    assert reasons["step-time"] == reasons["sections"] == "no finished run has a step log"
    assert reasons["step-time-by-batch-size"] == "no finished run has a step log"
    assert reasons["gpu"] == "the measuring machine showed no GPU"
    assert "two samples" in reasons["host-cpu"]
    assert "two or more cells" in reasons["sweep"]
    assert reasons["block-values"] is reasons["request-timeline"] is None
    edit_manifest(results, gpus=(GpuInfo(index=0, name="H200"),))
    assert charts_of(results.path)["gpu"].skipped == "no GPU sample was taken during the load"


def test_a_directory_without_a_finished_run_has_no_chart_and_no_error(tmp_path):
    results = write_results(tmp_path / "r", block_factors=SPREAD[:1])
    for planned in results.plan().runs:
        edit_run(results, planned.run_id, state="failed")
    assert all(chart.skipped for chart in charts_of(results.path).values())


def test_steps_that_only_prefill_are_not_in_the_chart_by_batch_size(tmp_path):
    results = write_results(tmp_path / "r")
    for planned in results.plan().runs:
        edit_steps(results, planned.run_id, lambda step: msgspec.structs.replace(step, phase="prefill"))
    assert (
        charts_of(results.path)["step-time-by-batch-size"].skipped == "no finished run has steps that only decode"
    )


def test_numbers_that_no_json_can_hold_become_gaps():
    assert [rounded(value, 3) for value in (1.23456789, math.nan, math.inf, None)] == [1.23, None, None, None]


def test_a_picture_is_the_same_each_time_and_of_the_kind_that_is_asked_for(swept):
    chart = charts_of(swept.path)["sweep"]
    for suffix, beginning in ((".png", b"\x89PNG\r\n"), (".svg", b"<svg"), (".pdf", b"%PDF")):
        assert picture_bytes(chart.spec, "title", suffix=suffix).startswith(beginning)
    assert chart_bytes(chart) == chart_bytes(chart)


def test_long_labels_break_between_words_and_never_inside_one():
    assert wrapped("baseline") == "baseline"
    long = wrapped("guided top_k=2, value_model=qwen2.5-0.5b")
    assert long == "guided top_k=2,\nvalue_model=qwen2.5-0.5b"
    assert wrapped("a_word_of_more_than_twenty_two_letters") == "a_word_of_more_than_twenty_two_letters"
