"""The steps of a result directory as input of a step-time model."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.results.builders import edit_run, edit_steps, write_results

from benchctl.analysis.attribution.work import work_of
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.observed import observed_steps, read_sources
from benchctl.costs.hardware import hardware_for
from benchctl.errors import UsageError
from benchctl.interop.tables import TableDefaults
from benchctl.records.columns import columns_from
from benchctl.records.schema import StepRecord
from benchctl.steptime.work import ObservedSteps, StepWork

BASELINE, GUIDED = 0, 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_results(tmp_path / "r", loads_in_warmup=True).path


def observe(path: Path, index: int, hardware: str | None = None) -> ObservedSteps | str:
    experiment = load_experiment(path, allow_suspect=True)
    run = experiment.results.runs[index]
    try:
        return observed_steps(experiment, run, None if hardware is None else hardware_for(hardware))
    except UsageError as error:
        return str(error)


def test_prompts_and_decoding_rows_have_their_own_counts(path: Path) -> None:
    observed = observe(path, BASELINE)
    assert isinstance(observed, ObservedSteps)
    work = observed.work
    assert (work.num_prefills[0], work.prefill_tokens[0], work.prefill_context[0]) == (8, 160, 0)
    assert work.prefill_positions[0] == 8 * 20 * 20 / 2
    assert (work.num_decodes[1], work.decode_tokens[1]) == (8, 8)
    assert work.decode_context[1] == 8 * 21 - 8
    assert work.decode_positions[1] == 8 * 20.5
    np.testing.assert_allclose(observed.duration_us, 10_000.0)
    assert observed.deployment.shape.name == "qwen2.5-7b"
    assert observed.deployment.hardware.name == "h100-sxm"
    assert observed.origin is not None
    assert (observed.origin.engine, observed.origin.clock) == ("sim", "host")


def test_the_warm_up_is_left_out_and_guidance_counted(path: Path) -> None:
    observed = observe(path, GUIDED)
    assert isinstance(observed, ObservedSteps)
    assert len(observed.duration_us) == 8
    assert observed.duration_us.max() < 100_000
    assert observed.work.candidates[1] == 24
    assert observed.work.value_prefill_tokens[0] == 160
    assert observed.deployment.value_shape is not None


def test_preempted_steps_are_marked(path: Path) -> None:
    run_id = load_experiment(path).results.runs[BASELINE].record.run_id
    from benchctl.records.directory import ResultDirectory

    edit_steps(
        ResultDirectory(path),
        run_id,
        lambda step: msgspec.structs.replace(step, preempted=1) if step.step == 3 else step,
    )
    observed = observe(path, BASELINE)
    assert isinstance(observed, ObservedSteps)
    assert observed.left_out == {"preemption": 1}
    assert observed.is_saturated.tolist() == [False, False, True, *[False] * 5]


def test_a_full_cache_is_marked_by_the_servers_own_capacity(path: Path) -> None:
    from benchctl.records.directory import ResultDirectory

    results = ResultDirectory(path)
    run_id = load_experiment(path).results.runs[BASELINE].record.run_id
    edit_steps(results, run_id, lambda step: msgspec.structs.replace(step, kv_used_blocks=10 * step.step))
    edit_run(results, run_id, effective_config={"model": "qwen2.5-7b", "num_kv_blocks": 60})
    observed = observe(path, BASELINE)
    assert isinstance(observed, ObservedSteps)
    assert observed.left_out == {"key-value memory above 95%": 3}


def test_a_chunked_prompt_continues_where_the_step_before_left_it(path: Path) -> None:
    from benchctl.records.directory import ResultDirectory

    run_id = load_experiment(path).results.runs[BASELINE].record.run_id
    chunks = {1: (100, 100, 0), 2: (100, 200, 0), 3: (56, 256, 1)}

    def chunk(step: object) -> object:
        if step.step not in chunks:  # type: ignore[attr-defined]
            return step
        tokens, context, output = chunks[step.step]  # type: ignore[attr-defined]
        return msgspec.structs.replace(  # type: ignore[type-var]
            step,
            phase="prefill",
            num_seqs=1,
            num_prefill_tokens=tokens,
            num_decode_tokens=0,
            context_tokens=context,
            output_tokens=output,
        )

    edit_steps(ResultDirectory(path), run_id, chunk)
    observed = observe(path, BASELINE)
    assert isinstance(observed, ObservedSteps)
    assert observed.work.prefill_context[:3].tolist() == [0, 100, 200]
    assert observed.work.prefill_positions[:3].tolist() == [5000, 15000, 56 * 228]
    assert observed.work.num_sampled[:3].tolist() == [0, 0, 1]


def test_a_simulated_run_has_the_device_that_its_server_computes_for(path: Path) -> None:
    profile = path / "profile.yaml"
    text = profile.read_text(encoding="utf-8")
    profile.write_text(text.replace("{kind: sim}", "{kind: sim, options: {hardware: a100-sxm}}"), encoding="utf-8")
    observed = observe(path, BASELINE)
    assert isinstance(observed, ObservedSteps)
    assert observed.deployment.hardware.name == "a100-sxm"


def test_another_device_than_that_of_the_run_is_refused_and_other_peaks_of_it_are_taken(path: Path) -> None:
    assert observe(path, BASELINE, "a100-sxm") == (
        "it ran on h100-sxm, and a100-sxm is named for it: leave out --hardware"
    )
    with pytest.raises(UsageError, match=r"no run has steps that a model can use: .*a100-sxm is named for it"):
        read_sources([path], TableDefaults(hardware="a100-sxm"))
    measured = "h100-sxm:790:3000:measured=20260131T120000Z"
    observed = observe(path, BASELINE, measured)
    assert isinstance(observed, ObservedSteps)
    assert observed.deployment.hardware.name == measured


def test_runs_that_cannot_be_used_say_why(path: Path) -> None:
    from benchctl.records.directory import ResultDirectory

    results = ResultDirectory(path)
    runs = [run.record.run_id for run in load_experiment(path).results.runs]
    edit_run(results, runs[0], steps_cover="sampler")
    (results.run(runs[1]).path / "steps.jsonl").write_text("", encoding="utf-8")
    sources = read_sources([path])
    assert [line.split(": ", 1)[1] for line in sources.skipped] == [
        "the step log times the sampler alone",
        "there is no step log",
    ]
    assert len(sources.observed) == 4
    for run_id in runs[2:]:
        (results.run(run_id).path / "steps.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match=r"no run has steps that a model can use: .*times the sampler alone"):
        read_sources([path])


def test_a_directory_and_a_table_are_sources_together(path: Path, tmp_path: Path) -> None:
    from support.step_time import planted_run, write_table

    run = planted_run("qwen2.5-1.5b", 1, {"memory": 1.2, "steps": 100.0}, num_steps=30)
    table = write_table(tmp_path / "steps.csv", replace(run, run="elsewhere"))
    sources = read_sources([path, table], TableDefaults())
    assert len(sources.observed) == 7
    assert sources.observed[-1].run == "elsewhere"


def test_drafts_have_logits_of_their_own_and_accepted_ones_end_no_prompt() -> None:
    """Four rows verify three drafts each, and a chunk of a prompt that goes on; eight tokens go to clients."""
    records = [
        StepRecord(
            step=i,
            start_ns=i,
            dur_ns=1,
            clock="virtual",
            phase="mixed",
            num_seqs=5,
            num_prefill_tokens=64,
            num_decode_tokens=16,
            context_tokens=480 + 64 * i,
            output_tokens=8 + i,
            drafts=4,
            draft_tokens=12,
            accepted_tokens=4,
        )
        for i in (0, 1)
    ]
    work = work_of(columns_from(records))
    assert isinstance(work, StepWork)
    assert list(work.num_decodes) == [4, 4]
    assert list(work.num_prefills) == [1, 1]
    assert list(work.num_sampled) == [16, 17]
    assert list(work.prefill_context) == [0, 64]
