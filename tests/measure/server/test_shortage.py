"""A server lacked memory where the kernel killed a process of its own control group, and only there."""

from pathlib import Path

import pytest

from benchctl.measure.server.health import Shortage

UNIFIED = ("0::/jobs/ours", "jobs/ours/memory.events", "low 0\nmax 3\noom 1\noom_kill {}\noom_group_kill 0\n")
FIRST_VERSION = ("3:cpu:/\n4:memory:/ours\n0::/", "memory/ours/memory.oom_control", "under_oom 0\noom_kill {}\n")


def shortage(directory: Path, listed: str) -> Shortage:
    groups = directory / "groups"
    groups.write_text(f"{listed}\n")
    return Shortage(directory, groups=groups, group_files=directory, log_room_bytes=0)


@pytest.mark.parametrize(("listed", "file", "counts"), [UNIFIED, FIRST_VERSION])
def test_a_kill_in_the_control_group_of_the_server_is_a_lack_of_memory(tmp_path, listed, file, counts):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(counts.format(2))
    before = shortage(tmp_path, listed)
    assert before.diagnosis() is None
    path.write_text(counts.format(3))
    found = before.diagnosis()
    assert found is not None
    assert found.cause == "out-of-memory"


@pytest.mark.parametrize("listed", ["0::/jobs/ours", "4:memory:/ours", "3:cpu:/"])
def test_a_kill_elsewhere_on_the_machine_claims_nothing_of_the_server(tmp_path, listed):
    others = [tmp_path / "jobs/others/memory.events", tmp_path / "memory/others/memory.oom_control"]
    for path in others:
        path.parent.mkdir(parents=True)
        path.write_text("oom_kill 0\n")
    before = shortage(tmp_path, listed)
    for path in others:
        path.write_text("oom_kill 5\n")
    assert before.diagnosis() is None
