"""The charts of the report page: valid figures whose numbers are those of the analysis, or a reason for none."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.results.builders import T0_NS, edit_manifest, edit_requests, edit_run, edit_steps, write_results

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.summary.analyzed import analyze_directory
from benchctl.records.noise import MetricNoise
from benchctl.records.record import RequestError
from benchctl.records.schema import GpuInfo, GpuSample, HostSample
from benchctl.report.charts.figure import SERIES, Chart, legend_px, no_chart, rounded, wrapped
from benchctl.report.page.charts.acceptance import draw_charts

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


def charts_of(path, **more):
    return {chart.id: chart for chart in draw_charts(analyze_directory(path), **more)}


def traces_of(chart, **having):
    return [t for t in chart.figure["data"] if all(t.get(name) == value for name, value in having.items())]


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
def test_a_figure_is_of_traces_in_the_bundle_and_json_can_hold_it(swept, chart_id):
    figure = charts_of(swept.path)[chart_id].figure
    assert {trace["type"] for trace in figure["data"]} <= {"scatter", "bar"}
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure


@pytest.mark.parametrize("chart_id", IDS)
def test_every_trace_has_as_many_x_as_y(swept, chart_id):
    for trace in charts_of(swept.path)[chart_id].figure["data"]:
        beside = [
            len(trace[name]) for name in ("y", "customdata", "base", "text") if isinstance(trace.get(name), list)
        ]
        assert set(beside) == {len(trace["x"])}, trace.get("name")


@pytest.mark.parametrize("chart_id", IDS)
def test_every_axis_says_what_it_shows(swept, chart_id):
    layout = charts_of(swept.path)[chart_id].figure["layout"]
    axes = {name: axis["title"]["text"] for name, axis in layout.items() if name.startswith(("xaxis", "yaxis"))}
    if chart_id == "sections":
        assert axes.pop("yaxis") == ""  # its labels are names of arms
    assert all(axes.values()), axes


def test_no_chart_sets_what_belongs_to_the_theme_of_the_page(swept):
    for chart in charts_of(swept.path).values():
        layout = chart.figure["layout"]
        assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"
        assert not {"template", "font", "width", "colorway", "title"} & set(layout)
        assert not any("gridcolor" in axis for axis in layout.values() if isinstance(axis, dict))


def test_an_arm_has_the_same_colour_in_every_chart(swept):
    seen = {}
    for chart_id in ("block-values", "step-time", "step-time-by-batch-size", "host-cpu"):
        for trace in charts_of(swept.path)[chart_id].figure["data"]:
            if trace.get("name"):
                marker = trace.get("line", trace.get("marker")).get("color") or trace["marker"]["color"]
                seen.setdefault(trace["name"], set()).add(marker)
    assert len(seen) == 4  # arms
    assert seen["baseline"] == {SERIES[0]}
    assert all(len(colors) == 1 for colors in seen.values())


def test_the_example_of_a_simulator_gives_charts_that_agree_with_its_summary():
    analysis = analyze_directory(EXAMPLE)
    charts = {chart.id: chart for chart in draw_charts(analysis)}
    for cell in analysis.cells:
        bars = traces_of(charts["sections"], type="bar")
        place = next(i for i, label in enumerate(bars[0]["y"]) if label.replace("<br>", " ") == cell.label)
        assert math.fsum(bar["x"][place] for bar in bars) == pytest.approx(cell.centre("step_ms"), rel=1e-6)
    assert charts["step-time-by-batch-size"].skipped == "every decode step has 4 sequences: see step_ms"


def test_the_steps_of_all_batch_sizes_add_up_to_those_of_the_arm(swept):
    analysis = analyze_directory(swept.path)
    charts = {chart.id: chart for chart in draw_charts(analysis)}
    for cell in analysis.cells:
        decode = traces_of(charts["step-time-by-batch-size"], name=cell.label)[0]
        in_phase = [run.run.columns.in_phase("decode") for run in cell.runs]
        assert sum(row[0] for row in decode["customdata"]) == sum(int(mask.sum()) for mask in in_phase)
        total = sum(run.run.columns.dur_ns[mask].sum() / 1e6 for run, mask in zip(cell.runs, in_phase, strict=True))
        means = zip(decode["y"], decode["customdata"], strict=True)
        assert math.fsum(y * row[0] for y, row in means) == pytest.approx(total, rel=1e-6)


def test_the_course_of_a_run_keeps_the_mean_and_the_number_of_its_steps():
    analysis = analyze_directory(EXAMPLE)
    chart = next(chart for chart in draw_charts(analysis) if chart.id == "step-time")
    for cell in analysis.cells:
        lines = {t["meta"]["block"]: t for t in traces_of(chart, name=cell.label) if "customdata" in t}
        assert list(lines) == ["0", "1", "2", "3", "4", "5"]
        for run in cell.runs:
            line = lines[str(run.record.block)]
            count = sum(row[3] for row in line["customdata"])
            assert count == run.number("num_steps")
            mean = math.fsum(row[2] * row[3] for row in line["customdata"]) / count
            assert mean == pytest.approx(run.number("step_ms"), rel=1e-6)
            rows = zip(line["customdata"], line["y"], strict=True)
            assert all(row[0] <= median <= row[1] for row, median in rows)


def test_the_raw_value_of_every_run_stands_in_its_block(swept):
    analysis = analyze_directory(swept.path)
    chart = next(chart for chart in draw_charts(analysis) if chart.id == "block-values")
    panels = {"step_ms": "y", "tpot_ms": "y2", "wall_s": "y3"}
    for name, panel in panels.items():
        for cell in analysis.cells:
            (trace,) = traces_of(chart, name=cell.label, yaxis=panel)
            shown = {row[2]: (row[0], row[1]) for row in trace["customdata"]}
            assert shown == {run.record.run_id: (run.record.block, run.number(name)) for run in cell.runs}


def test_a_block_that_stands_out_is_open_and_one_that_is_left_out_is_crossed(tmp_path):
    factors = [{"baseline": 1.0, "guided": 1.0 + 0.002 * b} for b in range(9)]
    factors[4]["guided"] = 3.0
    results = write_results(tmp_path / "r", block_factors=factors)
    edit_run(results, results.plan().runs[-1].run_id, state="suspect")
    sides = [parse_side(f"{results.path}:{variant}") for variant in ("baseline", "guided")]
    cells = compare_sides(*sides, CompareOptions()).cells
    chart = charts_of(results.path, cells=cells)["block-values"]
    (guided,) = traces_of(chart, name="guided top_k=5", yaxis="y")
    symbols = dict(zip([row[0] for row in guided["customdata"]], guided["marker"]["symbol"], strict=True))
    assert symbols[4] == "circle-open"
    assert symbols[8] == "x-thin-open"
    assert {symbols[block] for block in (0, 1, 2, 3, 5, 6, 7)} == {"circle"}
    assert "left out: suspect" in guided["customdata"][8][2]
    joint = traces_of(chart, yaxis="y", hoverinfo="skip")[0]
    assert not any(x is not None and x > 7.5 for x in joint["x"])  # nothing is joined to what does not count


def test_arms_that_lie_far_apart_are_shown_in_per_cent_of_their_own_mean(tmp_path):
    near = write_results(tmp_path / "near", block_factors=SPREAD)
    far = write_results(
        tmp_path / "far", block_factors=[{"baseline": f["baseline"], "guided": 9 * f["guided"]} for f in SPREAD]
    )
    assert "per cent" not in charts_of(near.path)["block-values"].caption
    chart = charts_of(far.path)["block-values"]
    assert "per cent" in chart.caption
    (guided,) = traces_of(chart, name="guided top_k=5", yaxis="y")
    mean = (9 * 9 * 1.2 * 9) ** (1 / 3) / 9
    assert guided["y"] == pytest.approx([100 * (f / mean - 1) for f in (1.0, 1.2, 1.0)], abs=1e-3)


def test_the_sweep_shows_the_ratio_interval_and_blocks_of_every_cell(swept):
    analysis = analyze_directory(swept.path)
    chart = next(chart for chart in draw_charts(analysis) if chart.id == "sweep")
    (line,) = traces_of(chart, name="guided", yaxis="y", mode="lines+markers")
    estimates = [row.estimates["wall"] for row in analysis.sweep]
    assert line["x"] == [1.0, 2.0, 5.0]
    assert line["y"] == pytest.approx([estimate.ratio for estimate in estimates], rel=1e-5)
    for row, estimate in zip(line["customdata"], estimates, strict=True):
        assert row == [pytest.approx(estimate.ci_low, rel=1e-5), pytest.approx(estimate.ci_high, rel=1e-5), 3]
    (single,) = traces_of(chart, name="guided", yaxis="y", mode="markers")
    assert len(single["x"]) == 9


def test_the_grey_band_is_the_noise_floor_where_one_is_known(swept):
    floor = MetricNoise(log_sd=0.01, num_blocks=8, floor_frac=0.05)
    known = charts_of(swept.path, noise={"wall_s": floor, "step_ms": floor})["sweep"]
    bands = [shape for shape in known.figure["layout"]["shapes"] if shape["type"] == "rect"]
    assert [(band["y0"], band["y1"]) for band in bands] == [pytest.approx((1 / 1.05, 1.05))] * 2
    assert "A/A" in known.caption
    own = charts_of(swept.path)["sweep"]
    logs = [math.log(factor["baseline"]) for factor in SPREAD]
    band = next(shape for shape in own.figure["layout"]["shapes"] if shape["type"] == "rect")
    assert math.log(band["y1"]) == pytest.approx(np.std(logs, ddof=1), rel=1e-6)


def test_several_factors_give_a_line_for_each_value_of_the_others(tmp_path):
    cells = [{"top_k": k, "value_model": m} for k in (2, 5, 40) for m in ("small", "large")]
    chart = charts_of(write_results(tmp_path / "r", cells=cells).path)["sweep"]
    lines = traces_of(chart, yaxis="y", mode="lines+markers")
    assert {line["name"]: line["x"] for line in lines} == {
        "guided value_model=small": [2.0, 5.0, 40.0],
        "guided value_model=large": [2.0, 5.0, 40.0],
    }
    assert chart.figure["layout"]["xaxis"]["type"] == "log"


def test_factors_that_are_words_stand_side_by_side_and_are_not_joined(tmp_path):
    cells = [{"value_model": m} for m in ("small", "large")]
    chart = charts_of(write_results(tmp_path / "r", cells=cells).path)["sweep"]
    assert chart.figure["layout"]["xaxis"]["type"] == "category"
    assert not traces_of(chart, mode="lines+markers")
    assert "error_y" in traces_of(chart, name="guided", yaxis="y", showlegend=True)[0]


def test_gpu_and_host_are_shown_between_first_send_and_last_output_only(swept):
    charts = charts_of(swept.path)
    for chart_id in ("gpu", "host-cpu"):
        for trace in charts[chart_id].figure["data"]:
            assert min(trace["x"]) >= 0
            assert max(trace["x"]) < 0.2
    names = {trace["name"] for trace in charts["gpu"].figure["data"]}
    assert {"baseline, GPU 0", "baseline, GPU 1"} <= names
    titles = [axis["title"]["text"] for name, axis in charts["gpu"].figure["layout"].items() if "yaxis" in name]
    assert titles == ["power,<br>W", "SM clock,<br>MHz", "utilisation,<br>%"]  # no panel for what nobody reported
    assert set(traces_of(charts["host-cpu"], yaxis="y")[0]["y"]) == {1.5}


def test_a_request_that_failed_is_crossed_in_the_timeline(tmp_path):
    results = write_results(tmp_path / "r", num_requests=6)
    broken = RequestError(kind="reset", message="connection reset")

    def fail(request):
        if request.index != 2:
            return request
        return msgspec.structs.replace(request, error=broken, choices=(), done_ns=None)

    edit_requests(results, results.plan().runs[0].run_id, fail)
    chart = charts_of(results.path)["request-timeline"]
    (cross,) = traces_of(chart, mode="markers")
    assert (cross["y"], cross["text"], cross["yaxis"]) == ([3], ["r00002: reset"], "y")
    waits, decodes, *_ = traces_of(chart, type="bar", yaxis="y")
    assert len(waits["x"]) == 6
    assert decodes["y"] == [1, 2, 4, 5, 6]
    assert decodes["base"][0] == pytest.approx(waits["base"][0] + waits["x"][0])


def test_of_many_requests_two_hundred_are_shown_and_the_caption_says_so(tmp_path):
    results = write_results(tmp_path / "r", num_requests=450, output_tokens=2, n=1)
    chart = charts_of(results.path)["request-timeline"]
    rows = traces_of(chart, type="bar", yaxis="y")[0]["y"]
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


def test_a_chart_has_either_a_figure_or_a_reason():
    with pytest.raises(ValueError, match="either a figure or a reason"):
        Chart(id="x", title="X", caption="", definition="", figure=None, skipped=None, height=1)
    assert no_chart("x", "X", "nothing to see").skipped == "nothing to see"


def test_numbers_that_no_json_can_hold_become_gaps():
    assert rounded([1.23456789, math.nan, math.inf, None], 3) == [1.23, None, None, None]


def test_a_legend_of_many_arms_asks_for_more_room():
    assert legend_px([]) == 0
    assert legend_px(["a", "b"]) < legend_px(["a long label of an arm"] * 6)


def test_long_labels_break_between_words_and_never_inside_one():
    assert wrapped("baseline", 16) == "baseline"
    long = wrapped("guided top_k=2, value_model=qwen2.5-0.5b", 16)
    assert long == "guided top_k=2,<br>value_model=<br>qwen2.5-0.5b"
    assert wrapped("a_word_of_more_than_sixteen_letters", 16) == "a_word_of_more_than_sixteen_letters"
