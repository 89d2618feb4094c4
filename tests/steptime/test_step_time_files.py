"""Files of step times: models that return unchanged, tables of steps and of layers, and what cannot be used."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.datasets import DATA, needs_data
from support.layer_tables import attention_us, step_us, write_tables
from support.peaks import gpu_peaks
from support.step_time import MODELS, names_of, planted_run, write_table

from benchctl.analysis.experiment.observed import read_sources
from benchctl.costs.model_shape import MoeShape
from benchctl.costs.shapes import ModelShape
from benchctl.errors import UsageError
from benchctl.interop.layer_profile import read_layer_tables
from benchctl.interop.tables import TableDefaults, read_step_table
from benchctl.records.peaks import hardware_of
from benchctl.steptime.evaluate import judge
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.layer_tables import AttentionCell, AttentionTable, Line, SkewedBatch, SkewTable
from benchctl.steptime.layers import Chunks, DecodingRows, LayerProfile, Link, captured_sizes
from benchctl.steptime.model import FORMAT, HeldOutError, model_text, read_model, write_model


@pytest.fixture(scope="module")
def model():
    planted = {"compute": 1.5, "memory": 1.2, "all_reduce": 1.0, "layers": 40.0, "requests": 8.0, "steps": 90.0}
    runs = [planted_run(*deployment, planted, noise=0.02, num_steps=60) for deployment in MODELS[:2]]
    fitted = fit_model(runs, FitOptions(num_draws=10), fitted_on="2026-11-22")
    held_out = HeldOutError(by="run", num_groups=2, num_steps=120, mape_frac=0.03, bias_frac=-0.01)
    return replace(fitted, provenance=replace(fitted.provenance, held_out=(held_out,)))


def test_a_model_returns_from_its_file_unchanged_and_byte_for_byte(model, tmp_path):
    write_model(tmp_path / "model.json", model)
    assert read_model(tmp_path / "model.json") == model
    assert (tmp_path / "model.json").read_text(encoding="utf-8") == model_text(model)


def test_the_file_states_where_the_model_comes_from(model):
    document = json.loads(model_text(model))
    provenance = document["provenance"]
    assert (document["format"], provenance["fitted_on"], provenance["num_steps"]) == (FORMAT, "2026-11-22", 120)
    assert provenance["models"] == ["qwen2.5-7b", "qwen2.5-72b"]
    assert provenance["held_out"][0]["mape_frac"] == 0.03
    assert [coefficient["name"] for coefficient in document["coefficients"]][:2] == ["compute", "memory"]
    rows = [line for line in model_text(model).splitlines() if line.startswith("  [") and len(line) > 3]
    assert len(rows) == 10  # of draws


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "something"}, "not a step-time model; name a file of 'benchctl steptime fit -o'"),
        ({"version": 2}, "version 2 of the format is unknown to this benchctl, which reads 1; fit the model again"),
        ({"hardware": 3}, r"damaged \(Expected `str`, got `int`.*fit the model again"),
        ({"colour": "blue"}, "key 'colour' is unknown; remove it"),
        ({"draws": [[1.0]]}, "a row of draws has not 6 values"),
    ],
    ids=["format", "version", "type", "key", "draws"],
)
def test_a_file_that_is_none_is_refused_with_the_remedy(model, tmp_path, change, message):
    with pytest.raises(UsageError, match=r"cannot be read.*steptime fit -o FILE"):
        read_model(tmp_path / "model.json")
    (tmp_path / "model.json").write_text(json.dumps(json.loads(model_text(model)) | change))
    with pytest.raises(UsageError, match=message):
        read_model(tmp_path / "model.json")


def test_a_draw_is_the_model_of_another_set_of_runs(model):
    drawn = model.with_draw(3)
    assert tuple(coefficient.value for coefficient in drawn.coefficients) == model.draws[3]
    assert model.with_draw(13) == drawn
    assert replace(model, draws=()).with_draw(3) == replace(model, draws=())


MEASURED = hardware_of(gpu_peaks())
PLANTED = dict.fromkeys(names_of("overlap"), 1.3)


def test_a_model_keeps_its_measured_peaks_in_its_file_and_for_later_steps_of_the_device(tmp_path):
    run = planted_run("qwen2.5-7b", 1, PLANTED, hardware=MEASURED.name)
    write_model(tmp_path / "m.json", fit_model([run]))
    model = read_model(tmp_path / "m.json")
    assert model.hardware == MEASURED.name
    assert model.predict_us(run.work, run.deployment) == pytest.approx(run.duration_us, rel=1e-3)
    later = hardware_of(gpu_peaks(bfloat16=700e12, measured_at="2027-01-01T00:00:00Z"))
    again = replace(run, deployment=replace(run.deployment, hardware=later))
    assert judge(model, [again]).whole.mape_frac < 1e-3
    with pytest.raises(UsageError, match="the deployment of a100-sxm"):
        judge(model, [planted_run("qwen2.5-7b", 1, PLANTED, hardware="a100-sxm")])


def test_runs_with_several_peaks_of_one_device_are_not_fitted_together():
    runs = [planted_run("qwen2.5-7b", 1, PLANTED, hardware=name) for name in ("h100-sxm", MEASURED.name)]
    with pytest.raises(UsageError, match=r"several peaks of one device.*name one with --hardware"):
        fit_model(runs)


NO_DEFAULTS = TableDefaults()


def test_a_table_with_our_columns_returns_the_steps(tmp_path):
    run = planted_run("qwen2.5-7b", 1, PLANTED)
    (observed,) = read_step_table(write_table(tmp_path / "steps.csv", run), NO_DEFAULTS)
    assert (observed.run, observed.model, observed.deployment) == (run.run, run.model, run.deployment)
    assert len(observed.origin.sha256) == 64
    np.testing.assert_allclose(observed.duration_us, run.duration_us)
    for name, values in asdict(run.work).items():
        np.testing.assert_allclose(getattr(observed.work, name), values, err_msg=name)


def test_json_lines_in_nanoseconds_are_the_same_steps(tmp_path):
    run = planted_run("qwen2.5-7b", 1, PLANTED, num_steps=20)
    rows = [
        {
            "dur_ns": round(run.duration_us[i] * 1000),
            "num_seqs": int(run.work.num_seqs[i]),
            "num_prefill_tokens": int(run.work.prefill_tokens[i]),
            "num_decode_tokens": int(run.work.decode_tokens[i]),
            "context_tokens": int(run.work.context[i] + run.work.tokens[i]),
        }
        for i in range(20)
    ]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (observed,) = read_step_table(path, TableDefaults(model="qwen2.5-7b", hardware="h100-sxm"))
    np.testing.assert_allclose(observed.duration_us, run.duration_us, rtol=1e-6)
    np.testing.assert_allclose(observed.work.num_decodes, run.work.num_decodes)
    np.testing.assert_allclose(observed.work.num_prefills, run.work.num_prefills)


@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        (
            {"num_prefill_tokens": "x", "context_tokens": "y"},
            "columns are missing: num_prefill_tokens or prefill_tokens or batch.prefill_tokens; context_tokens",
        ),
        ({"duration_us": "time"}, "columns are missing: dur_ns or duration_us or cycle_us"),
        ({"duration_us": "step.duration_us"}, "step.duration_us is the time of the scheduler and not of the step"),
        ({"num_decodes": "x"}, "columns are missing: num_decodes or batch.num_decode_reqs or num_seqs"),
        ({"hardware": "x"}, "no column hardware; add it, or name the hardware with --hardware"),
        ({"model": "x"}, "no column model; add it, or name the model with --model"),
    ],
    ids=["two", "time", "scheduler", "rows", "hardware", "model"],
)
def test_a_missing_column_is_named_with_the_remedy(tmp_path, renamed, message):
    path = write_table(tmp_path / "steps.csv", planted_run("qwen2.5-7b", 1, PLANTED), **renamed)
    with pytest.raises(UsageError) as refusal:
        read_step_table(path, NO_DEFAULTS)
    assert f"{path}: {message}" in str(refusal.value)


def test_values_that_are_no_numbers_and_models_without_a_shape_are_named(tmp_path):
    path = write_table(tmp_path / "steps.csv", planted_run("qwen2.5-7b", 1, PLANTED, num_steps=5))
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:3], lines[3].rpartition(",")[0] + ",many"]), encoding="utf-8")
    with pytest.raises(UsageError, match="context_tokens is 'many' in row 3 of its run; every step needs a number"):
        read_step_table(path, NO_DEFAULTS)
    path.write_text("\n".join(lines).replace("qwen2.5-7b", "gpt-5-preview"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"gpt-5-preview.*--shape gpt-5-preview=DIR names the directory"):
        read_step_table(path, NO_DEFAULTS)
    shapes = TableDefaults(shapes={"gpt-5-preview": "qwen2.5-7b"})
    assert read_step_table(path, shapes)[0].deployment.shape.name == "qwen2.5-7b"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.csv", b"model,hardware,duration_us\n", "has no rows; it needs one row a step"),
        ("broken.jsonl", b"{", r"broken.jsonl:1: no row of a table: .*; correct the row"),
        ("long.csv", b"model,duration_us\na,1\nb,2,3\n", r"long.csv:3: 3 values under 2 names; correct the row"),
        (
            "latin.csv",
            b"model\nmod\xe8le\n",
            r"latin.csv:2: cannot be read: it is not UTF-8 text .*; correct the row",
        ),
        ("steps.parquet", b"PAR1", "from a Parquet file, write a CSV file first"),
        ("none", None, "neither a result directory nor a table of steps"),
        ("", None, "neither a result directory nor a table of steps"),
    ],
)
def test_files_and_directories_that_hold_no_steps_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_sources([tmp_path / name])


def test_saturated_steps_are_marked_with_the_first_reason(tmp_path):
    run = planted_run("qwen2.5-7b", 1, PLANTED, num_steps=6)
    path = write_table(tmp_path / "steps.csv", run, duration_us="cycle_us")
    header = "preempted,kv_used_frac,prev.prefill,next.batch.prefill_tokens"
    extra = [header, "1,0.99,0,0", ",0.96,,", *[",0.2,,"] * 3, ",0.2,900,"]
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(f"{line},{more}" for line, more in zip(lines, extra, strict=False)), encoding="utf-8")
    (observed,) = read_step_table(path, NO_DEFAULTS)
    assert observed.left_out["preemption"] == observed.left_out["key-value memory above 95%"] == 1
    assert observed.is_saturated[[0, 1, 5]].all()


@needs_data
def test_the_published_steps_are_two_runs_without_those_next_to_long_prompts():
    runs = read_step_table(DATA / "steps/vllm-h100-steps.csv", TableDefaults(hardware="h100-sxm"))
    deployments = [(run.deployment.shape.name, run.deployment.tensor_parallel) for run in runs]
    assert deployments == [("llama-2-70b", 4), ("codellama-34b", 2)]
    assert [len(run.duration_us) for run in runs] == [658, 716]
    reason = "long prompt next to a time from start to start"
    assert [run.left_out for run in runs] == [{reason: 1}, {reason: 2}]


SHAPE = ModelShape(name="small", layers=4, hidden=64, q_heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=1000)


@pytest.fixture(params=[False, True], ids=["kv_prefill", "prefill_key"])
def profile(tmp_path, request):
    return LayerProfile(read_layer_tables(write_tables(tmp_path / "tp1", measures_key=request.param)), SHAPE)


@pytest.fixture
def folder(tmp_path):
    return write_tables(tmp_path / "tp1")


def test_a_line_passes_through_its_points_and_goes_on_but_less_work_never_takes_longer():
    line = Line.through([(8, 20.0), (2, 8.0), (4, 10.0)])
    assert [line.at(x) for x in (1, 2, 3, 4, 6, 8, 12)] == [7, 8, 9, 10, 15, 20, 30]
    falling = Line.through([(1, 5.0), (2, 4.0), (3, 3.0)])
    assert [falling.at(x) for x in (0.5, 9)] == [5, 3]
    assert Line.through([(1, 0.5), (2, 10.0)]).at(0) == 0
    for points, message in (([(1, 5.0), (1, 6.0)], "remove repeated rows"), ([], "at least one point")):
        with pytest.raises(UsageError, match=message):
            Line.through(points)


@pytest.mark.parametrize(
    ("chunks", "rows", "expected_us"),
    [
        (
            Chunks(number=1, tokens=100, positions=100 * 250),
            (5, 120),
            step_us(4, 105, 6, attention_us(100, 200, 5, 120)),
        ),
        (Chunks(number=1, tokens=256, positions=256 * 128), (0, 0), step_us(4, 256, 1, attention_us(256, 0, 0, 0))),
        (Chunks(), (8, 512), step_us(4, 8, 8, attention_us(0, 0, 8, 512))),
    ],
    ids=["both", "prompt", "rows"],
)
def test_a_step_of_prompts_and_decoding_rows_is_the_sum_of_its_layers(profile, chunks, rows, expected_us):
    decodes = DecodingRows(number=rows[0], context=rows[0] * rows[1])
    assert profile.step_us(chunks, decodes) == pytest.approx(expected_us)


def test_cells_that_did_not_fit_and_two_short_prompts_lie_on_the_lines_of_the_others(profile):
    both = Chunks(number=2, tokens=256, positions=2 * 128 * 64)  # they attend to less than one of their length
    for place in ((256, 512, 8, 4096), (256, both.history, 0, 0)):
        assert profile.tables.attention.at(*place) == pytest.approx(attention_us(*place))
    assert both.history == -64


def test_prompts_never_take_less_than_the_decoding_rows_beside_them():
    cells = {
        AttentionCell(0, 0, 1, 16): 10.0,
        AttentionCell(0, 0, 1, 32): 12.0,
        AttentionCell(64, 0, 0, 0): 8.0,
        AttentionCell(64, 64, 0, 0): 40.0,
        AttentionCell(64, 0, 1, 16): 18.0,
        AttentionCell(64, 64, 1, 16): 50.0,
        AttentionCell(64, 0, 1, 32): 20.0,
        AttentionCell(64, 64, 1, 32): 52.0,
    }
    assert AttentionTable(cells).at(64, -31, 1, 16) == 10.0


@settings(max_examples=50)
@given(rows=st.integers(1, 20), context=st.integers(1, 9000))
def test_the_line_of_a_decode_stretch_is_the_table(rows, context):
    cells = (AttentionCell(0, 0, n, k) for n in (1, 4, 16) for k in (16, 64, 1024, 4096))
    table = AttentionTable({cell: 5 + cell.rows**0.9 * cell.context**0.95 for cell in cells})
    line = table.decode_line(rows, context)
    assert line.since <= context < (line.until or context + 1)
    assert line.intercept_us + line.slope_us * context == pytest.approx(table.at(0, 0, rows, context))


def test_a_batch_is_padded_to_the_next_captured_graph(folder):
    profile = LayerProfile(read_layer_tables(folder), SHAPE, graph_sizes=(1, 2, 4, 8))
    assert profile.of_tokens_us(5) == profile.of_tokens_us(8)
    assert profile.of_tokens_us(9) < profile.of_tokens_us(10)
    sizes = captured_sizes(256)  # those that vLLM captures
    assert (sizes[:7], sizes[-2:], len(sizes)) == ((1, 2, 4, 8, 16, 24, 32), (496, 512), 51)
    assert captured_sizes(12)[-1] == 24


def test_devices_that_share_a_layer_pass_their_sums_around_the_ring(folder):
    alone = read_layer_tables(folder)
    shared = replace(alone, tensor_parallel=4, link=Link(latency_us=10.0, bandwidth_bytes_per_s=1e9))
    extra_us = LayerProfile(shared, SHAPE).of_tokens_us(8) - LayerProfile(alone, SHAPE).of_tokens_us(8)
    hop_us = 10 + 8 * 64 * 2 / 4 / 1e9 * 1e6
    assert extra_us == pytest.approx(9 * 2 * 3 * hop_us)  # two all-reduces in each of 4 layers, one before
    with pytest.raises(UsageError, match="link_bw and link_latency"):
        LayerProfile(replace(shared, link=None), SHAPE)


def test_the_folder_of_a_run_states_which_table_and_which_link(tmp_path):
    with pytest.raises(UsageError, match=r"dense\.csv, per_sequence\.csv, attention\.csv.*none"):
        read_layer_tables(tmp_path)
    for degree in (1, 2):
        write_tables(tmp_path / "layer-profile" / "small" / "bf16" / f"tp{degree}")
    with pytest.raises(UsageError, match=r"tp1, tp2\. Name a folder"):
        read_layer_tables(tmp_path / "layer-profile" / "small" / "bf16")
    config = {"link_bw": [16], "link_latency": 1000, "nodes": [{"instances": [{"tp_size": 2}]}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tables, link = read_layer_tables(tmp_path), Link(latency_us=1.0, bandwidth_bytes_per_s=16 * 2**30)
    assert (tables.tensor_parallel, tables.link) == (2, link)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("dense", "layer,tokens\nqkv_proj,1\n", "column time_us is missing"),
        ("dense", "layer,tokens,time_us\nqkv_proj,1,fast\n", r"dense\.csv:2: .*'fast'"),
        ("dense", "layer,tokens,time_us\nqkv_proj,1,2\nqkv_proj,1,3\n", "remove repeated rows"),
        (
            "attention",
            "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n64,0,0,0,5\n0,0,1,16,3\n",
            "measure at least two values of each column",
        ),
    ],
)
def test_a_damaged_table_names_place_and_remedy(folder, name, text, message):
    (folder / f"{name}.csv").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_layer_tables(folder)


@pytest.mark.parametrize("column", ["", "ep,"])
def test_blocks_of_experts_take_the_place_of_the_feed_forward_block(folder, column):
    moe = MoeShape(layers=3, experts=8, experts_per_token=2, expert_ffn=32)
    with pytest.raises(UsageError, match=r"without a moe\.csv"):
        LayerProfile(read_layer_tables(folder), replace(SHAPE, moe=moe))
    with (folder / "dense.csv").open("a", encoding="utf-8") as file:
        file.write("gate_up_proj,1,100\n")
    rows = [f"{tokens},{experts},{10 + tokens + 5 * experts}" for tokens in (1, 64) for experts in (2, 8)]
    if column:
        rows = [f"1,{row}" for row in rows] + ["2,1,2,0", "2,1,8,0", "2,64,2,0", "2,64,8,0"]
    (folder / "moe.csv").write_text("\n".join([f"{column}tokens,activated_experts,time_us", *rows, ""]))
    profile = LayerProfile(read_layer_tables(folder), replace(SHAPE, moe=moe))
    experts = 8 * (1 - (1 - 2 / 8) ** 16)
    expected = step_us(4, 16, 1, 0) - (500 + 20 + 1.5 + 0.5) + 100 + 3 * (10 + 16 + 5 * experts)
    assert profile.of_tokens_us(16) == pytest.approx(expected)


def skewed_batch(rows: int, chunk: int, long_rows: int, share: float, *, slower: float = 1.0) -> SkewedBatch:
    """Rows of 64 tokens but ``long_rows`` of 256, with the controls of the small tables."""
    mean = 64 + (256 - 64) * long_rows / rows
    mean_us, longest_us = (slower * attention_us(chunk, 0, rows, context) for context in (mean, 256))
    return SkewedBatch(rows, chunk, 64, 256, mean, mean_us, longest_us, mean_us + share * (longest_us - mean_us))


def test_unequal_contexts_take_the_measured_share_of_the_way_to_the_longest():
    table = SkewTable([skewed_batch(8, 0, 1, 0.3), skewed_batch(8, 0, 4, 0.1), skewed_batch(8, 256, 1, 0.7)])
    shares = [table.share(*place) for place in ((0, 8, 1 / 8), (0, 7, 0.5), (200, 8, 1 / 8))]
    assert shares == pytest.approx([0.3, 0.1, 0.7])
    assert table.share(0, 8, 0.95) == table.share(0, 1, 1 / 8) == 0  # nothing like it was measured
    beyond = SkewTable([skewed_batch(8, 0, 1, 1.4), skewed_batch(8, 64, 1, -0.2)])
    assert (beyond.share(0, 8, 1 / 8), beyond.share(64, 8, 1 / 8)) == (1, 0)


@pytest.mark.parametrize(("slower", "share"), [(1.0, 0.25), (1.2, 0.25), (3.0, 0)])
def test_skew_is_used_if_its_controls_are_of_the_same_kernel(folder, slower, share):
    batches = [skewed_batch(8, 0, long_rows, 0.25, slower=slower) for long_rows in (1, 2, 4)]
    lines = ["n,pc,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us", "8,0,64,4096,128,,,"]
    lines += [",".join(map(str, batch)) for batch in batches]
    (folder / "skew.csv").write_text("\n".join([*lines, ""]))
    decodes = DecodingRows(number=8, context=8 * 88, shortest=64, longest=256)
    attention = attention_us(0, 0, 8, 88) * (1 - share) + share * attention_us(0, 0, 8, 256)
    profile = LayerProfile(read_layer_tables(folder), SHAPE)
    assert profile.step_us(Chunks(), decodes) == pytest.approx(step_us(4, 8, 8, attention))
