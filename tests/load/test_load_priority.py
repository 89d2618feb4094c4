"""A load client that asks to run first: what it gets, that nothing inherits it, and that being refused is no harm.

Each case is a process of its own, because scheduling is a property of processes and threads, and what they may ask
for a property of how they were started.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from benchctl.load.process import NICE

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="needs the policies of Linux")
FIFO, OTHER = (getattr(os, name, None) for name in ("SCHED_FIFO", "SCHED_OTHER"))
WITHOUT_CAPABILITY = ("setpriv", "--inh-caps=-sys_nice", "--bounding-set=-sys_nice")
PRELUDE = """
import json, os, resource, subprocess, sys, threading
from pathlib import Path
from benchctl.load.process import load_priority

def scheduling(pid=0):
    flag = os.SCHED_RESET_ON_FORK
    return [os.sched_getscheduler(pid) & ~flag, os.getpriority(os.PRIO_PROCESS, pid)]

def of_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(scheduling()))
    thread.start()
    thread.join()
    return found

def of_a_child():
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            return scheduling(child.pid)
        finally:
            child.kill()
"""


def nice_0():
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def told_by(code: str, *prefix: str, arguments: tuple[str, ...] = ()):
    """What the code, run behind the words of ``prefix`` at nice 0, prints as its last line."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", PRELUDE + code, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=nice_0,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(name="privileged", scope="module")
def _privileged():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the machine has one core, on which real-time scheduling is never asked for")
    if told_by("with load_priority('auto') as got: print(json.dumps(got.level))") != "fifo":
        pytest.skip("the system grants no priority here: 'benchctl doctor' says what would bring it")


@pytest.fixture(name="can_drop", scope="module")
def _can_drop():
    """Whether a process can be started without the capability."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, to start a process without CAP_SYS_NICE")
    if subprocess.run([*WITHOUT_CAPABILITY, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs root, to start a process without CAP_SYS_NICE")


THROUGHOUT = """
told = []

def throughout(num_processes):
    seen = {"before": scheduling()}
    with load_priority("auto", num_processes) as got:
        seen |= {"inside": scheduling(), "thread": of_a_thread(), "child": of_a_child()}
    seen |= {"after": scheduling(), "later thread": of_a_thread(), "later child": of_a_child()}
    told.append([got.level, seen])

"""


def test_only_the_thread_of_the_event_loop_is_raised_and_only_inside_and_never_on_the_only_core(privileged):
    alone = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nthroughout(1)\n"
    told = told_by(f"{THROUGHOUT}throughout(1)\nthroughout(99)\n{alone}print(json.dumps(told))")
    cases = ("fifo", [FIFO, 0]), ("nice", [OTHER, NICE]), ("nice", [OTHER, NICE])  # alone, all others would wait
    for (level, seen), (expected, inside) in zip(told, cases, strict=True):
        assert (level, seen.pop("inside")) == (expected, inside)
        assert seen == {when: [OTHER, 0] for when in seen}


SERVER = """
from benchctl.measure.server.process import Supervised
from benchctl.measure.server.supervise import Launched

def of_a_server():
    server = Supervised(Launched(argv=["sleep", "60"], env=dict(os.environ), raw_log=sys.argv[1]))
    try:
        return scheduling(server.pid)
    finally:
        server.stop(1)

told = []
for num_processes in (1, 99):
    with load_priority("auto", num_processes):
        told.append(of_a_server())
    told.append(of_a_server())
print(json.dumps(told))
"""


def test_a_server_started_meanwhile_or_afterwards_is_ordinary(privileged, tmp_path):
    assert told_by(SERVER, arguments=(str(tmp_path / "log"),)) == [[OTHER, 0]] * 4


def test_who_starts_benchctl_at_another_priority_keeps_it_and_a_profile_may_ask_for_none():
    code = """
before = scheduling()
with load_priority("auto") as got:
    print(json.dumps([before, scheduling(), str(got)]))
"""
    for start in (("nice", "-n", "5"), ("chrt", "--batch", "0"), ("chrt", "--idle", "0")):
        if shutil.which(start[0]) is not None:
            before, inside, got = told_by(code, *start)
            assert inside == before
            assert got.startswith("normal (benchctl was started")
    code = "with load_priority('none') as got: print(json.dumps([scheduling()[0], str(got)]))"
    assert told_by(code) == [OTHER, "normal (not requested)"]


def test_a_limit_is_permission_enough_and_can_be_used_again_and_again(privileged, can_drop):
    """Without the capability the kernel does not take the flag off again, which must not matter."""
    if subprocess.run(["prlimit", "--rtprio=1", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs CAP_SYS_RESOURCE, to raise the limit of a process")
    code = """
seen = []
for _ in range(2):
    with load_priority("auto") as got:
        seen.append([got.level, scheduling(), of_a_child()])
    seen.append(["after", scheduling(), of_a_child()])
print(json.dumps(seen))
"""
    seen = told_by(code, "prlimit", "--rtprio=1", *WITHOUT_CAPABILITY)
    assert seen == [["fifo", [FIFO, 0], [OTHER, 0]], ["after", [OTHER, 0], [OTHER, 0]]] * 2


def test_who_loses_the_permission_meanwhile_and_a_load_that_breaks_off_are_ordinary_afterwards(
    privileged, can_drop
):
    for begins, ends in (("with", "    os.setuid(65534)"), ("with suppress(OSError),", "    raise OSError")):
        code = (
            f"from contextlib import suppress\n{begins} load_priority('auto') as got:\n{ends}\n"
            "print(json.dumps([got.level, scheduling(), of_a_thread(), of_a_child()]))"
        )
        assert told_by(code) == ["fifo", *[[OTHER, 0]] * 3]


RUNS = """
from support.servers.paced_engine import PacedEngine, planned, profile, request
from benchctl.measure.run import RunContext, measure_run
from benchctl.records.directory import RunDirectory
from benchctl.records.directory import RequestSets

told = []
for number, asked in enumerate(sys.argv[2:]):
    workers, clock = asked.split()
    directory = Path(sys.argv[1], str(number))
    directory.mkdir()
    context = RunContext(
        profile=profile(load={"workers": int(workers)}),
        requests=RequestSets.single(request(i, max_tokens=3, gap_ms=1) for i in range(4)),
        engine=PacedEngine(truth=directory / "truth.jsonl", clock=clock),
    )
    record = measure_run(context, planned(), RunDirectory(directory / "run"))
    told.append([record.state, record.client_priority, scheduling()])
print(json.dumps(told))
"""


def runs(directory: Path, *asked: str, prefix: tuple[str, ...] = ()):
    """What one process says of its runs, one after another, each of so many workers under a clock."""
    return told_by(RUNS, *prefix, arguments=(str(directory), *asked))


def test_a_refused_permission_leaves_the_load_alone_and_the_run_says_so(can_drop, tmp_path):
    ((state, got, afterwards),) = runs(tmp_path, "2 host", prefix=WITHOUT_CAPABILITY)
    assert (state, afterwards) == ("done", [OTHER, 0])
    assert got.startswith("normal (fifo: ")
    assert got.endswith("nice: Permission denied)")


def test_a_run_says_what_its_client_and_its_workers_got_and_a_virtual_clock_needs_none(privileged, tmp_path):
    one, (state, got, afterwards), virtual = runs(tmp_path, "1 host", "2 host", "1 virtual")
    assert one == ["done", "fifo", [OTHER, 0]]
    assert (state, afterwards) == ("done", [OTHER, 0])
    is_roomy = len(os.sched_getaffinity(0)) > 3
    assert got == ("fifo" if is_roomy else "nice -10 (fifo: the load could occupy every core)")
    assert virtual[1] == "normal (not requested)"
