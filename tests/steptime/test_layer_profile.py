"""Step time from measured layers: interpolation, the sum of a forward pass, and the reader of the tables."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.costs.model_shape import MoeShape
from benchctl.costs.shapes import ModelShape
from benchctl.errors import UsageError
from benchctl.interop.layer_profile import read_layer_tables
from benchctl.steptime.layer_tables import AttentionCell, AttentionTable, Line, SkewedBatch, SkewTable
from benchctl.steptime.layers import Chunks, DecodingRows, LayerProfile, LayerTables, Link, captured_sizes
from tests.support.layer_tables import attention_us, step_us, write_tables

SHAPE = ModelShape(name="small", layers=4, hidden=64, q_heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=1000)


@pytest.fixture(params=[False, True], ids=["kv_prefill", "prefill_key"])
def profile(tmp_path: Path, request: pytest.FixtureRequest) -> LayerProfile:
    return LayerProfile(read_layer_tables(write_tables(tmp_path / "tp1", measures_key=request.param)), SHAPE)


def test_a_line_passes_through_its_points_and_goes_on() -> None:
    line = Line.through([(8, 20.0), (2, 8.0), (4, 10.0)])
    assert [line.at(x) for x in (2, 3, 4, 6, 8, 12)] == [8, 9, 10, 15, 20, 30]
    assert line.at(1) == 7


def test_less_work_never_takes_longer_beyond_the_ends_of_a_line() -> None:
    falling = Line.through([(1, 5.0), (2, 4.0), (3, 3.0)])
    assert falling.at(0.5) == 5
    assert falling.at(9) == 3
    assert Line.through([(1, 0.5), (2, 10.0)]).at(0) == 0


def test_a_line_needs_one_value_for_each_place() -> None:
    with pytest.raises(UsageError, match="remove repeated rows"):
        Line.through([(1, 5.0), (1, 6.0)])
    with pytest.raises(UsageError, match="at least one point"):
        Line.through([])


def test_a_step_of_prompts_and_decoding_rows_is_the_sum_of_its_layers(profile: LayerProfile) -> None:
    chunks = Chunks(number=1, tokens=100, positions=100 * (200 + 50))
    expected = step_us(4, 105, 6, attention_us(100, 200, 5, 120))
    assert profile.step_us(chunks, DecodingRows(number=5, context=5 * 120)) == pytest.approx(expected)


def test_a_prompt_alone_and_rows_alone_are_priced(profile: LayerProfile) -> None:
    prompt = Chunks(number=1, tokens=256, positions=256 * 128)
    assert profile.step_us(prompt, DecodingRows()) == pytest.approx(step_us(4, 256, 1, attention_us(256, 0, 0, 0)))
    assert profile.step_us(Chunks(), DecodingRows(number=8, context=8 * 512)) == pytest.approx(
        step_us(4, 8, 8, attention_us(0, 0, 8, 512))
    )


def test_cells_that_did_not_fit_lie_on_the_line_of_those_that_did(profile: LayerProfile) -> None:
    assert profile.tables.attention.at(256, 512, 8, 4096) == pytest.approx(attention_us(256, 512, 8, 4096))


def test_two_short_prompts_together_attend_to_less_than_one_of_their_length(profile: LayerProfile) -> None:
    both = Chunks(number=2, tokens=256, positions=2 * 128 * 64)
    assert both.history == -64
    assert profile.tables.attention.at(256, both.history, 0, 0) == pytest.approx(attention_us(256, -64, 0, 0))


def test_prompts_never_take_less_than_the_decoding_rows_beside_them() -> None:
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


@given(rows=st.integers(1, 20), context=st.integers(1, 9000))
def test_the_line_of_a_decode_stretch_is_the_table(rows: int, context: int) -> None:
    places = [(n, k) for n in (1, 4, 16) for k in (16, 64, 1024, 4096)]
    table = AttentionTable({AttentionCell(0, 0, n, k): 5 + n**0.9 * k**0.95 for n, k in places})
    line = table.decode_line(rows, context)
    assert line.since <= context
    assert line.until is None or context < line.until
    assert line.intercept_us + line.slope_us * context == pytest.approx(table.at(0, 0, rows, context))


def test_a_batch_is_padded_to_the_next_captured_graph(tmp_path: Path) -> None:
    tables = read_layer_tables(write_tables(tmp_path / "tp1"))
    profile = LayerProfile(tables, SHAPE, graph_sizes=(1, 2, 4, 8))
    assert profile.of_tokens_us(5) == profile.of_tokens_us(8)
    assert profile.of_tokens_us(9) < profile.of_tokens_us(10)


def test_graphs_are_captured_for_the_sizes_that_vllm_captures() -> None:
    assert captured_sizes(256)[:7] == (1, 2, 4, 8, 16, 24, 32)
    assert captured_sizes(256)[-2:] == (496, 512)
    assert len(captured_sizes(256)) == 51
    assert captured_sizes(12)[-1] == 24


def test_devices_that_share_a_layer_pass_their_sums_around_the_ring(tmp_path: Path) -> None:
    alone = read_layer_tables(write_tables(tmp_path / "tp1"))
    link = Link(latency_us=10.0, bandwidth_bytes_per_s=1e9)
    shared = LayerTables(
        dense=alone.dense,
        per_sequence=alone.per_sequence,
        attention=alone.attention,
        tensor_parallel=4,
        link=link,
    )
    extra_us = LayerProfile(shared, SHAPE).of_tokens_us(8) - LayerProfile(alone, SHAPE).of_tokens_us(8)
    hop_us = 10 + 8 * 64 * 2 / 4 / 1e9 * 1e6
    assert extra_us == pytest.approx(9 * 2 * 3 * hop_us)  # two all-reduces in each of 4 layers, one before
    with pytest.raises(UsageError, match="link_bw and link_latency"):
        LayerProfile(LayerTables(dense={}, per_sequence={}, attention=alone.attention, tensor_parallel=2), SHAPE)


def test_the_folder_of_a_run_states_which_table_and_which_link(tmp_path: Path) -> None:
    for degree in (1, 2):
        write_tables(tmp_path / "layer-profile" / "small" / "bf16" / f"tp{degree}")
    (tmp_path / "config.json").write_text(
        '{"link_bw": [16], "link_latency": 1000, "nodes": [{"instances": [{"tp_size": 2}]}]}', encoding="utf-8"
    )
    tables = read_layer_tables(tmp_path)
    assert tables.tensor_parallel == 2
    assert tables.link == Link(latency_us=1.0, bandwidth_bytes_per_s=16 * 2**30)


def test_a_folder_without_tables_names_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dense\.csv, per_sequence\.csv, attention\.csv.*none"):
        read_layer_tables(tmp_path)
    for degree in (1, 2):
        write_tables(tmp_path / f"tp{degree}")
    with pytest.raises(UsageError, match=r"tp1, tp2\. Name a folder"):
        read_layer_tables(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer,tokens\nqkv_proj,1\n", "column time_us is missing"),
        ("layer,tokens,time_us\nqkv_proj,1,fast\n", r"dense\.csv:2: .*'fast'"),
        ("layer,tokens,time_us\nqkv_proj,1,2\nqkv_proj,1,3\n", "remove repeated rows"),
    ],
)
def test_a_damaged_table_names_place_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    folder = write_tables(tmp_path / "tp1")
    (folder / "dense.csv").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_layer_tables(folder)


def test_a_grid_of_one_chunk_and_one_history_is_too_small(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tp1")
    (folder / "attention.csv").write_text(
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n64,0,0,0,5\n0,0,1,16,3\n", encoding="utf-8"
    )
    with pytest.raises(UsageError, match="measure at least two values of each column"):
        read_layer_tables(folder)


@pytest.mark.parametrize("column", ["", "ep,"])
def test_blocks_of_experts_take_the_place_of_the_feed_forward_block(tmp_path: Path, column: str) -> None:
    folder = write_tables(tmp_path / "tp1")
    with (folder / "dense.csv").open("a", encoding="utf-8") as file:
        file.write("gate_up_proj,1,100\n")
    rows = [(tokens, experts, 10 + tokens + 5 * experts) for tokens in (1, 64) for experts in (2, 8)]
    lines = [f"{'1,' if column else ''}{tokens},{experts},{time_us}" for tokens, experts, time_us in rows]
    lines += [f"2,{tokens},{experts},0" for tokens, experts, _ in rows] if column else []
    (folder / "moe.csv").write_text(
        "\n".join([f"{column}tokens,activated_experts,time_us", *lines]) + "\n", encoding="utf-8"
    )
    moe = MoeShape(layers=3, experts=8, experts_per_token=2, expert_ffn=32)
    profile = LayerProfile(read_layer_tables(folder), replace(SHAPE, moe=moe))
    experts = 8 * (1 - (1 - 2 / 8) ** 16)
    expected = step_us(4, 16, 1, 0) - (500 + 20 + 1.5 + 0.5) + 100 + 3 * (10 + 16 + 5 * experts)
    assert profile.of_tokens_us(16) == pytest.approx(expected)
    with pytest.raises(UsageError, match=r"without a moe\.csv"):
        LayerProfile(read_layer_tables(write_tables(tmp_path / "dense")), replace(SHAPE, moe=moe))


def skewed_batch(rows: int, chunk: int, long_rows: int, share: float, *, slower: float = 1.0) -> SkewedBatch:
    """Rows of 64 tokens but ``long_rows`` of 256, with the controls of the small tables."""
    mean = 64 + (256 - 64) * long_rows / rows
    mean_us, longest_us = (slower * attention_us(chunk, 0, rows, context) for context in (mean, 256))
    return SkewedBatch(rows, chunk, 64, 256, mean, mean_us, longest_us, mean_us + share * (longest_us - mean_us))


def test_unequal_contexts_take_the_measured_share_of_the_way_to_the_longest() -> None:
    table = SkewTable([skewed_batch(8, 0, 1, 0.3), skewed_batch(8, 0, 4, 0.1), skewed_batch(8, 256, 1, 0.7)])
    assert table.share(0, 8, 1 / 8) == pytest.approx(0.3)
    assert table.share(0, 7, 0.5) == pytest.approx(0.1)
    assert table.share(200, 8, 1 / 8) == pytest.approx(0.7)
    assert table.share(0, 8, 0.95) == 0  # nothing like it was measured
    assert table.share(0, 1, 1 / 8) == 0


def test_a_share_lies_between_none_and_all() -> None:
    table = SkewTable([skewed_batch(8, 0, 1, 1.4), skewed_batch(8, 64, 1, -0.2)])
    assert (table.share(0, 8, 1 / 8), table.share(64, 8, 1 / 8)) == (1, 0)


@pytest.mark.parametrize(("slower", "is_used"), [(1.0, True), (1.2, True), (3.0, False)])
def test_skew_is_used_if_its_controls_are_of_the_same_kernel(tmp_path: Path, slower: float, is_used: bool) -> None:
    folder = write_tables(tmp_path / "tp1")
    batches = [skewed_batch(8, 0, long_rows, 0.25, slower=slower) for long_rows in (1, 2, 4)]
    lines = ["n,pc,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us", "8,0,64,4096,128,,,"]
    lines += [",".join(map(str, batch)) for batch in batches]
    (folder / "skew.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tables = read_layer_tables(folder)
    assert (tables.skew is not None) is is_used
    decodes = DecodingRows(number=8, context=8 * 88, shortest=64, longest=256)
    share = 0.25 if is_used else 0.0
    attention = attention_us(0, 0, 8, 88) * (1 - share) + share * attention_us(0, 0, 8, 256)
    assert LayerProfile(tables, SHAPE).step_us(Chunks(), decodes) == pytest.approx(step_us(4, 8, 8, attention))


def test_skew_in_another_layout_is_left_alone(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tp1")
    (folder / "skew.csv").write_text('layer,requests_json\nattention,"[]"\n', encoding="utf-8")
    assert read_layer_tables(folder).skew is None
