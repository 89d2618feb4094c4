"""The steps of a result directory as input of a step-time model: what they count, and which are left out."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from support.results.builders import (
    BASELINE,
    GUIDED,
    change_requests,
    change_steps,
    edit_requests,
    edit_run,
    edit_steps,
    run_ids,
    write_results,
)
from support.step_time import planted_run, write_table

from benchctl.analysis.attribution.work import fitted_draft_warnings, work_of
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.observed import observed_steps, read_sources, saturation, saturation_signs
from benchctl.costs.hardware import hardware_for
from benchctl.errors import UsageError
from benchctl.interop.tables import TableDefaults
from benchctl.records.columns import columns_from
from benchctl.records.record import RequestError
from benchctl.records.schema import StepRecord
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.work import StepWork, most_query_tokens, one_step


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", loads_in_warmup=True)


def observe(results, index=0, hardware=None):
    experiment = load_experiment(results.path, allow_suspect=True)
    named = None if hardware is None else hardware_for(hardware)
    return observed_steps(experiment, experiment.results.runs[index], named)


def test_prompts_and_decoding_rows_have_their_own_counts(results):
    observed = observe(results)
    work = observed.work
    assert (work.num_prefills[0], work.prefill_tokens[0], work.prefill_context[0]) == (8, 160, 0)
    assert work.prefill_positions[0] == 8 * 20 * 20 / 2
    assert (work.num_decodes[1], work.decode_tokens[1]) == (8, 8)
    assert work.decode_context[1] == 8 * 21 - 8
    assert work.decode_positions[1] == 8 * 20.5
    np.testing.assert_allclose(observed.duration_us, 10_000.0)
    assert (observed.deployment.shape.name, observed.deployment.hardware.name) == ("qwen2.5-7b", "h100-sxm")
    assert (observed.origin.engine, observed.origin.clock) == ("sim", "host")


def test_the_warm_up_is_left_out_and_guidance_counted(results):
    observed = observe(results, 1)
    assert len(observed.duration_us) == 8
    assert observed.duration_us.max() < 100_000
    assert (observed.work.candidates[1], observed.work.value_prefill_tokens[0]) == (24, 160)
    assert observed.deployment.value_shape is not None


def test_preempted_steps_and_a_full_cache_are_marked(results):
    change_steps(results, BASELINE, 3, preempted=1)
    observed = observe(results)
    assert observed.left_out == {"preemption": 1}
    assert observed.is_saturated.tolist() == [False, False, True, *[False] * 5]
    edit_steps(
        results, BASELINE, lambda step: msgspec.structs.replace(step, preempted=0, kv_used_blocks=10 * step.step)
    )
    edit_run(results, BASELINE, effective_config={"model": "qwen2.5-7b", "num_kv_blocks": 60})
    assert observe(results).left_out == {"key-value memory above 95%": 3}


def test_a_chunked_prompt_continues_where_the_step_before_left_it(results):
    for number, (tokens, context, output) in {1: (100, 100, 0), 2: (100, 200, 0), 3: (56, 256, 1)}.items():
        change_steps(
            results, BASELINE, number, phase="prefill", num_seqs=1, num_prefill_tokens=tokens, num_decode_tokens=0,
            context_tokens=context, output_tokens=output,
        )  # fmt: skip
    work = observe(results).work
    assert work.prefill_context[:3].tolist() == [0, 100, 200]
    assert work.prefill_positions[:3].tolist() == [5000, 15000, 56 * 228]
    assert work.num_sampled[:3].tolist() == [0, 0, 1]


def test_the_device_is_that_of_the_run_and_only_other_peaks_of_it_are_taken(results):
    with pytest.raises(UsageError, match="it ran on h100-sxm, and a100-sxm is named for it: leave out --hardware"):
        observe(results, hardware="a100-sxm")
    with pytest.raises(UsageError, match=r"no run has steps that a model can use: .*a100-sxm is named for it"):
        read_sources([results.path], TableDefaults(hardware="a100-sxm"))
    measured = "h100-sxm:790:3000:measured=20260131T120000Z"
    assert observe(results, hardware=measured).deployment.hardware.name == measured
    simulated = "{kind: sim, options: {hardware: a100-sxm}}"
    results.write_profile(results.profile_yaml().replace("{kind: sim}", simulated))
    assert observe(results).deployment.hardware.name == "a100-sxm"


def test_a_directory_and_a_table_are_sources_together_and_runs_that_cannot_be_used_say_why(results, tmp_path):
    run = planted_run("qwen2.5-1.5b", 1, {"memory": 1.2, "steps": 100.0}, num_steps=30)
    table = write_table(tmp_path / "steps.csv", replace(run, run="elsewhere"))
    observed = read_sources([results.path, table], TableDefaults()).observed
    assert (len(observed), observed[-1].run) == (7, "elsewhere")
    edit_run(results, BASELINE, steps_cover="sampler")
    results.run(GUIDED).step_log.write_text("")
    sources = read_sources([results.path])
    assert [line.split(": ", 1)[1] for line in sources.skipped] == [
        "the step log times the sampler alone",
        "there is no step log",
    ]
    assert len(sources.observed) == 4
    for run_id in (*run_ids(results, "baseline")[1:], *run_ids(results)):
        results.run(run_id).step_log.write_text("")
    with pytest.raises(UsageError, match=r"no run has steps that a model can use: .*times the sampler alone"):
        read_sources([results.path])


def test_drafts_have_logits_of_their_own_and_accepted_ones_end_no_prompt():
    """Four rows verify three drafts each, and a chunk of a prompt that goes on; eight tokens go to clients."""
    records = [
        StepRecord(
            step=i, start_ns=i, dur_ns=1, clock="virtual", phase="mixed", num_seqs=5, num_prefill_tokens=64,
            num_decode_tokens=16, context_tokens=480 + 64 * i, output_tokens=8 + i, drafts=4, draft_tokens=12,
            accepted_tokens=4,
        )
        for i in (0, 1)
    ]  # fmt: skip
    work = work_of(columns_from(records))
    columns = (work.num_decodes, work.num_prefills, work.num_sampled, work.prefill_context)
    assert [list(column) for column in columns] == [[4, 4], [1, 1], [16, 17], [0, 64]]


PLANTED = {"compute": 1.5, "memory": 1.2, "all_reduce": 1.0, "layers": 40.0, "requests": 8.0, "steps": 90.0}


def fitted(*row_tokens, structure="overlap"):
    """A model of one run for each number of query tokens of its rows."""
    runs = [
        planted_run("qwen2.5-7b", 1, PLANTED, seed=i, num_steps=60, row_tokens=number)
        for i, number in enumerate(row_tokens)
    ]
    return fit_model(runs, FitOptions(structure=structure, num_draws=5))


def draft_warnings(model, num_draft_tokens):
    warnings = fitted_draft_warnings(model, "m.json", num_draft_tokens)
    assert {warning.code for warning in warnings} <= {"drafts-not-fitted"}
    return [warning.message for warning in warnings]


def test_a_fit_records_its_most_query_tokens_and_only_longer_drafts_are_warned_of():
    assert most_query_tokens(StepWork(num_decodes=np.array([4.0, 8.0]), decode_tokens=np.array([4.0, 18.0]))) == 3
    assert most_query_tokens(one_step(num_decodes=7, context=9, row_tokens=5)) == 5
    assert most_query_tokens(one_step(num_decodes=0, context=0, num_prefills=2, prompt_tokens=9)) == 0
    model = fitted(1, 4)
    assert model.provenance.most_query_tokens == 4
    assert [len(draft_warnings(model, number)) for number in (0, 1, 3, 4)] == [0, 0, 0, 1]
    assert draft_warnings(model, 4)[0].startswith("m.json: fitted to steps of at most 4 query tokens")
    older = replace(model, provenance=replace(model.provenance, most_query_tokens=None))
    (message,) = draft_warnings(older, 2)
    assert "does not say whether the steps of its fit had drafts" in message
    assert draft_warnings(older, 0) == draft_warnings(fitted(1, structure="roofline"), 8) == []


@pytest.fixture(name="loaded")
def _loaded(tmp_path):
    return write_results(tmp_path / "r", num_requests=40, n=1)


def delay_requests(results, delay_ns):
    """Let each request of the first run be sent, and wait for its first token, later than the one before it."""

    def later(request):
        sent_ns = request.sent_ns + request.index * 10_000_000
        times = tuple(at + request.index * (10_000_000 + delay_ns) for at in request.choices[0].chunk_ns)
        choice = msgspec.structs.replace(request.choices[0], chunk_ns=times)
        return msgspec.structs.replace(
            request, scheduled_ns=sent_ns, sent_ns=sent_ns, done_ns=times[-1], choices=(choice,)
        )

    edit_requests(results, BASELINE, later)


def signs_of(results):
    run = load_experiment(results.path).results.runs[0]
    return list(saturation_signs(run)), saturation(run)


def test_first_tokens_that_come_later_and_later_keep_a_run_out_of_a_fit(loaded, tmp_path):
    assert signs_of(loaded) == ([], None)
    delay_requests(loaded, 5_000_000)
    signs, told = signs_of(loaded)
    assert signs[0] == "first tokens come later and later"
    assert signs[1].startswith("the last fifth waits ")
    assert told == f"saturated: {', '.join(signs)}"
    sources = read_sources([loaded.path])
    assert len(sources.observed) == 5
    assert f"{BASELINE}: {told}" in sources.skipped[0]
    few = write_results(tmp_path / "few", num_requests=6, n=1)
    delay_requests(few, 50_000_000)
    assert signs_of(few) == ([], None), "few requests have no trend"


def test_one_sign_alone_does_not_condemn_a_run_and_two_do(loaded):
    change_requests(loaded, BASELINE, 0, 10, 20, 30, error=RequestError(kind="reset", message="gone"))
    assert signs_of(loaded) == (["10% of the requests failed"], None)
    change_steps(loaded, BASELINE, *range(4, 9), preempted=2)
    assert signs_of(loaded)[1] == "saturated: 10% of the requests failed, 0.25 preemptions a request"
