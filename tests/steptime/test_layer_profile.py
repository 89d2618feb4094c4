"""Step time from measured layers: interpolation, the sum of a forward pass, and the reader of the tables."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.costs.model_shape import MoeShape
from benchctl.costs.shapes import ModelShape
from benchctl.errors import UsageError
from benchctl.interop.layer_profile import read_layer_tables
from benchctl.steptime.layer_tables import AttentionCell, AttentionTable, Line, SkewedBatch, SkewTable
from benchctl.steptime.layers import Chunks, DecodingRows, LayerProfile, Link, captured_sizes
from tests.support.layer_tables import attention_us, step_us, write_tables

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
