"""Sizes of KV caches: equal where they were stated, alike where servers chose them, and a difference otherwise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.builders import edit_run
from test_declared_settings import VLLM, compared, declared, directory

from benchctl.analysis.validity.launch import KV_SIZES, alike_sizes
from benchctl.errors import NotComparableError

BLOCKS = "server.num_gpu_blocks"
STATED = {"server.kv_cache_memory_bytes": 25_000_000_000}


def with_blocks(path, baseline, guided, **both):
    return directory(path, baseline={BLOCKS: baseline} | both, guided={BLOCKS: guided} | both)


def test_a_guided_server_with_a_smaller_cache_is_not_compared_and_both_sizes_are_named(tmp_path):
    results = with_blocks(tmp_path, 77_000, 29_000)
    with pytest.raises(NotComparableError) as caught:
        compared(results)
    assert caught.value.differences == (f"{BLOCKS}: 77000 against 29000",)
    assert f"--allow-difference {BLOCKS}" in str(caught.value)
    assert compared(results, None, BLOCKS).verdict != "invalid"


def test_what_two_starts_of_one_server_differ_in_is_no_difference(tmp_path):
    assert compared(with_blocks(tmp_path, 77_000, 76_500)).verdict != "invalid"


def test_sizes_that_were_stated_must_be_equal(tmp_path):
    assert compared(with_blocks(tmp_path / "a", 77_000, 77_000, **STATED)).verdict != "invalid"
    with pytest.raises(NotComparableError, match=f"{BLOCKS}: 77000 against 76999"):
        compared(with_blocks(tmp_path / "b", 77_000, 76_999, **STATED))


def test_a_size_that_changes_between_the_runs_of_one_side_is_a_difference(tmp_path):
    results = with_blocks(tmp_path, 77_000, 77_000)
    record = next(run.read() for run in results.runs())
    edit_run(results, record.run_id, effective_config=record.effective_config | {BLOCKS: 50_000})
    with pytest.raises(NotComparableError, match=r"num_gpu_blocks: (50000 or 77000|77000 or 50000) against 77000"):
        compared(results)


def test_a_size_that_an_older_directory_does_not_report_is_unknown(tmp_path):
    assert compared(directory(tmp_path, guided={BLOCKS: 29_000})).verdict != "invalid"


def test_two_experiments_with_other_computed_sizes_differ_in_them_as_in_any_setting(tmp_path):
    one, other = with_blocks(tmp_path / "a", 500, 500, **STATED), with_blocks(tmp_path / "b", 400, 400)
    for run in other.runs():
        config = run.read().effective_config | {"server.kv_cache_memory_bytes": 20_000_000_000}
        edit_run(other, run.read().run_id, effective_config=config)
    with pytest.raises(NotComparableError) as caught:
        compared(one, other)
    assert {difference.partition(":")[0] for difference in caught.value.differences} >= {*STATED, BLOCKS}


def test_a_value_model_declares_no_other_cache():
    guided = declared(
        "{server: {value_model: models/v}}", VLLM.replace("kind: vllm", "kind: vllm-lenvm"), "vllm-lenvm"
    )
    assert "server.value_model.*" in guided
    assert KV_SIZES.isdisjoint(guided)
    assert declared("{server: {gpu_memory_utilization: 0.5}}") >= KV_SIZES


numbers = st.integers(1, 10**6).map(str)


@given(left=st.lists(numbers, min_size=1, max_size=4), right=st.lists(numbers, min_size=1, max_size=4))
def test_sides_are_alike_in_both_directions_and_only_where_no_value_is_far_from_another(left, right):
    def are_equal(a, b):
        one, other = alike_sizes(BLOCKS, (tuple(a), tuple(b)), ({},))
        return len({*one, *other}) == 1

    values = [int(value) for value in (*left, *right)]
    assert are_equal(left, right) is are_equal(right, left) is (max(values) <= 1.02 * min(values))
