"""Two logs of one guided vLLM server, read as one series of steps."""

import json

import pytest
from test_vllm_steps import line

from benchctl.analysis.attribution.breakdown import break_down
from benchctl.engines.vllm_lenvm.engine import VllmLenvmEngine
from benchctl.errors import RecordError
from benchctl.records.columns import columns_from

SECTIONS = {"lvm_apply_outer": 900, "lvm_forward": 700}


def engine_line(number, num_seqs=2):
    step = line(100 + number, num_generation_requests=num_seqs)
    return step | {"details": step["details"] | {"iteration_index": number}}


def guided_line(number, num_seqs=2, **said):
    did = {"guided_rows": 2, "candidates": 9, "value_prefill_tokens": 5, "value_extend_tokens": 2, "fused": True}
    return {"step": number, "num_seqs": num_seqs, "start_ns": 1, "end_ns": 2, "sections_ns": SECTIONS} | did | said


def read(directory, engine, guided=()):
    (directory / "steps.raw.jsonl").write_text("".join(json.dumps(raw) + "\n" for raw in engine))
    if guided is not None:
        (directory / "steps.guided.jsonl").write_text("".join(json.dumps(raw) + "\n" for raw in guided))
    return list(VllmLenvmEngine().read_steps(directory))


def test_a_guided_step_says_what_was_scored_and_reused_and_how_long_its_parts_took(tmp_path):
    (step,) = read(tmp_path, [engine_line(0)], [guided_line(0)])
    assert (step.guided_rows, step.candidates, step.fused) == (2, 9, True)
    assert (step.value_prefill_tokens, step.value_extend_tokens) == (5, 2)
    assert (step.sections_ns, step.num_seqs, step.output_tokens) == (SECTIONS, 2, 1)
    assert (step.value_replayed, step.value_recordings) == (None, None)
    told = {"value_reuse_tokens": 2, "value_extend_tokens": 0, "value_replayed": False, "value_recordings": 1}
    (step,) = read(tmp_path, [engine_line(0)], [guided_line(0, **told)])
    assert {name: getattr(step, name) for name in told} == told


def test_steps_without_a_row_to_guide_are_known_to_have_none(tmp_path):
    # What the worker wrote last may be of a step that was never told.
    steps = read(tmp_path, [engine_line(number) for number in range(4)], [guided_line(2), guided_line(4)])
    assert [step.guided_rows for step in steps] == [0, 0, 2, 0]
    assert [bool(step.sections_ns) for step in steps] == [False, False, True, False]
    (tmp_path / "plain").mkdir()
    steps = read(tmp_path / "plain", [engine_line(0), engine_line(1)], None)
    assert [(step.guided_rows, step.candidates) for step in steps] == [(0, 0), (0, 0)]


def test_times_of_the_device_stand_beside_a_step_of_the_host_and_never_among_its_parts(tmp_path):
    on_device = {"clock": "device", "sections_ns": {"lvm_forward": 5_000_000}, "host_sections_ns": SECTIONS}
    (step,) = read(tmp_path, [engine_line(0)], [guided_line(0, **on_device)])
    assert step.clock == "host"
    assert step.sections_ns == SECTIONS | {"device.lvm_forward": 5_000_000}
    found = break_down(columns_from([step]))
    assert found.clocks == ("host",)
    assert found.unplaced == ["device.lvm_forward"]
    assert {section.name for section in found.tree} >= {"lvm_forward", "lvm_apply_outer", "sampler_total"}
    assert sum(found.leaf_means_ns.values()) == step.dur_ns


def test_a_step_of_the_device_without_times_of_the_host_has_no_parts(tmp_path):
    for clock, name in (("host", "sample"), ("device", "device.sample")):
        (step,) = read(tmp_path, [engine_line(0)], [guided_line(0, clock=clock, sections_ns={"sample": 3})])
        assert step.sections_ns == {name: 3}


@pytest.mark.parametrize(
    ("engine", "guided", "message"),
    [
        ([engine_line(0)], [guided_line(0, clock="wall")], r"steps\.guided\.jsonl"),
        ([engine_line(0, num_seqs=3)], [guided_line(0)], r"steps\.guided\.jsonl: step .* measure again"),
        ([engine_line(0), engine_line(2)], [guided_line(1)], r"steps\.guided\.jsonl: step .* measure again"),
    ],
    ids=["another-clock", "another-batch", "a-step-that-the-server-does-not-know"],
)
def test_logs_that_do_not_tell_of_the_same_steps_are_refused(tmp_path, engine, guided, message):
    with pytest.raises(RecordError, match=message):
        read(tmp_path, engine, guided)
