"""Cores of the server's and cores of the client's: who runs where, and what is recorded of it."""

import os
import subprocess
import sys
import threading

import pytest
from support.servers.paced_engine import PacedEngine, planned, profile, request
from support.waiting import wait_until

from benchctl.engines.vllm_options import VllmOptions
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.server import process as resources
from benchctl.measure.server.process import Supervised, process_on, split_cores
from benchctl.measure.server.supervise import Launched
from benchctl.profile.load import load_profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import RunDirectory

ALL = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
needs_two_cores = pytest.mark.skipif(len(ALL) < 2, reason="the machine has one core, which both sides share")


@pytest.fixture(name="machine")
def _machine(monkeypatch):
    """Makes a machine of so many cores of what the system says."""

    def of(*numbers):
        monkeypatch.setattr(resources.os, "sched_getaffinity", lambda _: set(numbers))

    return of


def test_the_client_gets_the_last_cores_and_the_server_the_others_where_somebody_asked(machine):
    for usable, asked, server, client in (
        (range(2), 1, "0", "1"),
        (range(8), 2, "0-5", "6-7"),
        ((0, 1, 4, 6, 7), 2, "0-1,4", "6-7"),
        (range(2), 5, "0", "1"),
    ):
        machine(*usable)
        split = split_cores(asked)
        assert split.as_config() == {"server.client_cores": f"client on {client}, server on {server}"}
        assert not split.server & split.client
    assert split_cores(0) is None
    machine(3)
    assert split_cores(1) is None


@needs_two_cores
def test_a_server_begins_on_its_cores_and_we_stay_where_we_are(tmp_path):
    first = min(ALL)
    said = tmp_path / "said"
    program = f"import os; open({str(said)!r}, 'w').write(repr(os.sched_getaffinity(0)))"
    launched = Launched(argv=(sys.executable, "-c", program), env=dict(os.environ), raw_log=str(tmp_path / "log"))
    started = Supervised(launched, frozenset({first}))
    wait_until("its end", lambda: started.returncode is not None)
    started.stop(1)
    assert said.read_text() == repr({first})
    assert os.sched_getaffinity(0) == ALL


@needs_two_cores
def test_all_threads_of_the_client_are_bound_and_those_that_begin_later_and_its_children():
    last, waiting, found = max(ALL), threading.Event(), []
    early = threading.Thread(target=lambda: (waiting.wait(), found.append(os.sched_getaffinity(0))))
    early.start()
    with process_on(frozenset({last})):
        late = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        late.start()
        late.join()
        waiting.set()
        early.join()
        program = "import os; print(os.sched_getaffinity(0))"
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        found.append(os.sched_getaffinity(0))
    assert found == [{last}] * 3
    assert child.stdout == f"{ {last} }\n"
    assert os.sched_getaffinity(0) == ALL


@needs_two_cores
def test_a_run_says_which_cores_its_server_had(tmp_path, monkeypatch):
    """The paced server speaks for a real one; its options are those of the simulator, which know no cores."""
    options = variant_settings(profile(), "baseline", {}).server
    monkeypatch.setattr(type(options), "client_cores_kept", property(lambda _: 1))
    directory = RunDirectory(tmp_path / "runs" / "000-b0-baseline")
    engine = PacedEngine(truth=tmp_path / "truth.jsonl")
    record = measure_run(
        RunContext(profile=profile(), requests=(request(0, gap_ms=1),), engine=engine), planned(), directory
    )
    assert record.state == "done"
    split = split_cores(1)
    assert split.as_config().items() <= record.effective_config.items()
    assert os.sched_getaffinity(0) == ALL


def test_presets_without_a_gpu_leave_the_client_a_core_in_all_variants_alike_and_the_simulator_is_never_bound():
    of_cpu = dict.fromkeys(("vllm-cpu", "vllm-lenvm", "transformers-cpu", "llamacpp-cpu"), 1)
    for engine, option in {**of_cpu, "vllm": "auto", "vllm-lenvm-gpu": "auto", "sglang": "auto", "sim": 0}.items():
        loaded = load_profile("topk-sweep", engine=engine)
        assert {variant_settings(loaded, *arm).server.client_cores_kept for arm in arms(loaded)} == {option}


def test_auto_sets_a_core_apart_for_each_process_of_the_load_where_eight_are_there(machine):
    for num_cores, num_processes, client in (
        (1, 1, 0), (2, 1, 0), (7, 1, 0), (8, 1, 1), (64, 1, 1), (16, 3, 0), (24, 3, 3), (64, 3, 3),
    ):  # fmt: skip
        machine(*range(num_cores))
        split = split_cores("auto", num_processes)
        assert (0 if split is None else len(split.client)) == client


def test_cores_for_the_client_that_are_no_number_are_refused():
    for option in (-1, "all", 1.5, None):
        with pytest.raises(ValueError, match="client_cores"):
            VllmOptions(client_cores=option)
