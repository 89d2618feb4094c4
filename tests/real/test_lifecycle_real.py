"""Processes of real servers are killed; ``scripts/kill_matrix`` kills all of them at all moments."""

import signal

import pytest
from support.servers.killing import FRONT_END, MOMENTS, Blow, strike
from support.servers.real_engines import needs, tiny_model, turn_of

from benchctl.records.warning_codes import CLIENT_SUSPECT_CODES, SUSPECT_CODES

pytestmark = [pytest.mark.real_engine, pytest.mark.slow]
TOLD_WITHIN_S = 5.0
CAUSES = {"server-died", "engine-died", "engine-failed"}
"""Where the log of the front end says more than that it ended, the cause is the engine's."""


def is_only_the_client_in_doubt(outcome):
    doubts = outcome.codes & SUSPECT_CODES
    return outcome.state == "suspect" and bool(doubts) and doubts <= CLIENT_SUSPECT_CODES


def fails_in_time(blow, tmp_path):
    """Strike, and hold what must come of it whoever is struck; returns the message."""
    outcome = strike(blow, tiny_model(tmp_path), tmp_path / "results")
    assert outcome.leftovers == ()
    if blow.moment == "stop" and (outcome.state == "done" or is_only_the_client_in_doubt(outcome)):
        return outcome.message  # all was measured, and benchctl was about to end the server itself
    assert (outcome.state, outcome.exit_code) == ("failed", 5)
    assert outcome.cause in CAUSES
    assert outcome.told_s < TOLD_WITHIN_S
    return outcome.message


@pytest.mark.nightly
@needs("transformers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_transformers_server_that_is_killed_fails_its_run_and_leaves_nothing(tmp_path, moment, number):
    with turn_of("transformers"):
        fails_in_time(Blow(engine="transformers-cpu", who=FRONT_END, number=number, moment=moment), tmp_path)


@needs("vllm")
@pytest.mark.parametrize(
    ("who", "number", "told"),
    [
        ("VLLM::EngineCore", signal.SIGKILL, "(VLLM::EngineCore)"),
        pytest.param("VLLM::Worker", signal.SIGTERM, "(VLLM::Worker)", marks=pytest.mark.nightly),
        pytest.param(FRONT_END, signal.SIGKILL, "the server was ended by SIGKILL", marks=pytest.mark.nightly),
    ],
)
def test_a_vllm_of_which_one_process_is_killed_under_load_fails_its_run_and_leaves_nothing(
    tmp_path, who, number, told
):
    with turn_of("vllm"):
        message = fails_in_time(Blow(engine="vllm-cpu", who=who, number=number, moment="load"), tmp_path)
    # vLLM's front end may notice first, and end itself before we have seen which process is gone.
    assert told in message or (who != FRONT_END and "a process of the engine ended in mid-work" in message)
