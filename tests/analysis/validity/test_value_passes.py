"""Passes of a value model that were recorded within the load, and kernels that a GPU has to do without."""

import msgspec
import pytest
from support.results.builders import edit_run, edit_steps, write_results

from benchctl.analysis.validity.checks import value_model_warnings
from benchctl.records.loaded import load_results
from benchctl.records.warning_codes import SUSPECT_CODES

GUIDED = "001-b0-guided-top_k5"


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.0},))


def warnings_of(results):
    return value_model_warnings(load_results(results.path).runs[1])


def plant(results, recordings, **changed):
    """Steps of 10 ms that record as many passes as ``recordings`` says for their numbers."""

    def planted(step):
        made = recordings.get(step.step, 0)
        dur_ns = 300_000_000 if made else 10_000_000
        return msgspec.structs.replace(
            step, value_recordings=made, value_replayed=not made, dur_ns=dur_ns, **changed
        )

    edit_steps(results, GUIDED, planted)


def test_passes_that_the_load_recorded_make_a_run_suspect_with_their_number_and_time(results):
    plant(results, {3: 1, 5: 2})
    (warning,) = warnings_of(results)
    assert warning.code == "value-passes-recorded-late"
    assert warning.code in SUSPECT_CODES
    assert "2 of 8 steps of the load recorded 3 passes" in warning.message
    assert "these steps took 0.6 s, 90.9% of the time of all; raise max_num_seqs" in warning.message


def test_passes_that_the_warm_up_recorded_do_no_harm(results):
    plant(results, {1: 4, 2: 1, 3: 0}, is_warmup=False)
    edit_steps(results, GUIDED, lambda step: msgspec.structs.replace(step, is_warmup=step.step < 3))
    assert warnings_of(results) == ()


def test_one_recording_in_a_long_load_is_enough(results):
    def planted(step):
        return msgspec.structs.replace(step, value_recordings=int(step.step == 5), dur_ns=10_000_000)

    edit_steps(results, GUIDED, planted)
    (warning,) = warnings_of(results)
    assert "1 of 8 steps of the load recorded 1 passes" in warning.message
    assert "12.5% of the time of all" in warning.message


def test_a_log_that_knows_nothing_of_recordings_and_one_of_a_server_that_records_none_say_nothing(results):
    assert warnings_of(results) == ()
    plant(results, {})
    assert warnings_of(results) == ()


def test_unguided_steps_between_recordings_are_not_counted_as_recordings(results):
    edit_steps(
        results,
        GUIDED,
        lambda step: msgspec.structs.replace(step, value_recordings=1 if step.step == 4 else None),
    )
    (warning,) = warnings_of(results)
    assert "1 of 8 steps of the load recorded 1 passes" in warning.message


def described(results, **description):
    config = {f"server.value_model.{name}": value for name, value in description.items()}
    edit_run(results, GUIDED, effective_config=config)
    return warnings_of(results)


def test_a_gpu_without_the_kernels_that_were_wanted_is_noted_with_the_reason(results):
    reason = "kernel gated differs from torch by 0.3 here, more than 0.06"
    (warning,) = described(results, device="cuda", has_kernels=False, kernels_reason=reason)
    assert warning.code == "value-kernels-missing"
    assert warning.code not in SUSPECT_CODES
    assert reason in warning.message


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"device": "cpu", "has_kernels": False, "kernels_reason": "kernels need a GPU"},
        {"device": "cuda", "has_kernels": True},
        {"device": "cuda", "has_kernels": False},
    ],
    ids=["nothing-said", "a-processor", "kernels", "kernels-switched-off"],
)
def test_nothing_is_noted_where_nobody_expects_kernels_or_they_run(results, description):
    assert described(results, **description) == ()
