"""A server lacked memory where the kernel killed a process of its own control group, and only there."""

from pathlib import Path

from benchctl.measure.server.health import Shortage

OURS = {
    "0::/jobs/ours": "jobs/ours/memory.events",
    "3:cpu:/\n4:memory:/ours\n0::/": "memory/ours/memory.oom_control",
    "3:cpu:/": None,
}
"""What a process is told of its control groups, and the file of the one that limits its memory."""


def test_a_kill_in_the_control_group_of_the_server_is_a_lack_of_memory_and_one_elsewhere_is_none(
    tmp_path: Path,
) -> None:
    for number, (listed, file) in enumerate(OURS.items()):
        directory = tmp_path / str(number)
        files = [directory / each for each in ("jobs/others/memory.events", *filter(None, OURS.values()))]
        for path in files:
            path.parent.mkdir(parents=True)
            path.write_text("low 0\noom 1\noom_kill 2\noom_group_kill 0\n")
        (directory / "groups").write_text(f"{listed}\n")
        shortage = Shortage(directory, groups=directory / "groups", group_files=directory, log_room_bytes=0)
        for path in sorted(files, key=lambda path: str(path).endswith(file or "-")):
            assert shortage.diagnosis() is None
            path.write_text("low 0\noom 1\noom_kill 3\noom_group_kill 0\n")
        found = shortage.diagnosis()
        assert (found and found.cause) == (file and "out-of-memory")
