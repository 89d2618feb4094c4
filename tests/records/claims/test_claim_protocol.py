"""The protocol of claims as a state machine: whatever processes and clocks do, a block has one owner at most.

Real lease files and the real code; only time is the test's own. Each process has a clock with an offset and a rate
of its own, may be paused anywhere between two steps of the protocol, killed, or revived.
"""

import errno
import os
import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from benchctl.errors import ClaimedError, LostClaimError
from benchctl.records import claims as held_module
from benchctl.records.claims import CLAIMS, LEASE_BYTES, HeldBlock, Owner, create_lease, lease_path, newest_leases
from benchctl.records.shared_claims import LeaseWatch, try_claim

LEASE_S = 12.0
NUM_PROCESSES = 3
NUM_ACTIONS = 80
NUM_HISTORIES = 150


def owner(name="n1", *, boot="boot-1", job=None):
    return Owner(node=name, hostname=name, boot_id=boot, pid=os.getpid(), job=job)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _handle: None)  # nothing here survives the machine
    (tmp_path / CLAIMS).mkdir()
    return tmp_path


@dataclass
class Process:
    """One process on a machine of its own."""

    index: int
    offset_s: float
    rate: float
    is_paused: bool = False
    held: HeldBlock | None = None
    watch: LeaseWatch | None = None
    is_busy: bool = False
    claims: int = 0


@dataclass
class World:
    """All processes, and the true time that none of them can read."""

    directory: object
    chance: random.Random
    now_s: float = 1e6
    depth: int = 0
    writes: list = field(default_factory=list)

    def __post_init__(self):
        self.processes = [
            Process(index, self.chance.uniform(-1e6, 1e6), self.chance.uniform(0.97, 1.03))
            for index in range(NUM_PROCESSES)
        ]

    def clock(self, process):
        return lambda: process.offset_s + self.now_s * process.rate

    def check(self):
        """At most one process may write at this moment, awake or not."""
        able = [process.index for process in self.processes if process.held and may_write(process.held)]
        assert len(able) <= 1, f"processes {able} may all write at {self.now_s}"
        return able

    def interleave(self):
        """What happens while one process stands between two steps."""
        if self.depth < 2:
            self.depth += 1
            for _ in range(self.chance.randrange(4)):
                self.act()
            self.depth -= 1

    def act(self):
        self.now_s += self.chance.choice([0.0, 0.3, 1.0, 2.0, 2.0, 5.0, 14.0])
        process = self.chance.choice(self.processes)
        kind = self.chance.choice(["go", "go", "go", "go", "pause", "resume", "resume", "kill", "release"])
        if kind == "pause":
            process.is_paused = True
        elif kind == "resume":
            process.is_paused = False
        elif not process.is_busy and not process.is_paused:
            process.is_busy = True
            self.go(process, kind)
            process.is_busy = False
        self.check()

    def go(self, process, kind):
        if process.held is None:
            self.claim(process)
        elif kind == "kill":
            process.held.close()
            process.held = process.watch = None
        elif kind == "release":
            process.held.release()
            process.held.close()
            process.held = process.watch = None
        elif not process.held.beat():
            process.held.close()
            process.held = process.watch = None

    def claim(self, process):
        clock = self.clock(process)
        boot = f"boot-{process.index}"
        process.watch = process.watch or Interrupted(self.directory, clock, boot, self.interleave)
        with suppress(ClaimedError):
            held = try_claim(
                self.directory, 0, owner(f"n{process.index}", boot=boot), LEASE_S, process.watch, clock
            )
            if held is not None:
                held.__class__ = InterruptedHeld
                held.interleave = self.interleave
                process.held, process.claims = held, process.claims + 1


class Interrupted(LeaseWatch):
    """A watch whose process may be paused between reading a lease and reading its clock."""

    def __init__(self, directory, clock, boot, interleave):
        super().__init__(directory, clock, boot)
        self.interleave = interleave

    def _content(self, path):
        content = super()._content(path)
        self.interleave()
        return content


class InterruptedHeld(HeldBlock):
    """A claim whose process may be paused between its check and its write."""

    def _write(self, **changes):
        self.interleave()
        super()._write(**changes)
        self.interleave()


def may_write(held):
    try:
        held.check()
    except LostClaimError:
        return False
    return True


def play(directory, seed, monkeypatch):
    """One history of ``NUM_ACTIONS`` actions; returns the number of claims in it."""
    for file in (directory / CLAIMS).iterdir():
        file.unlink()
    world = World(directory, random.Random(f"claims:{seed}"))
    created = held_module_created

    def paused_before_and_after(*arguments):
        world.interleave()
        handle = created(*arguments)
        world.interleave()
        return handle

    monkeypatch.setattr(held_module, "_created", paused_before_and_after)
    for _ in range(NUM_ACTIONS):
        world.act()
    for process in world.processes:
        if process.held is not None:
            process.held.close()
    return sum(process.claims for process in world.processes)


held_module_created = held_module._created


def test_no_history_of_pauses_kills_and_drifting_clocks_gives_a_block_two_owners(directory, monkeypatch):
    claims = [play(directory, seed, monkeypatch) for seed in range(NUM_HISTORIES)]
    assert sum(claims) > 3 * NUM_HISTORIES  # blocks were taken over again and again


def test_the_same_histories_find_two_owners_where_an_owner_trusts_itself_for_too_long(directory, monkeypatch):
    monkeypatch.setattr(held_module, "_SAFE_FRAC", 4.0)
    monkeypatch.setattr(held_module, "is_there", lambda _path, within: False)  # nor looks for a newer claim
    with pytest.raises(AssertionError, match="may all write"):
        [play(directory, seed, monkeypatch) for seed in range(NUM_HISTORIES)]


def test_a_disk_that_refuses_leaves_no_claim(directory, monkeypatch):
    def refuse(_handle):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output"):
        create_lease(directory, 0, 1, owner(), LEASE_S)
    assert not list((directory / CLAIMS).iterdir())


def test_a_claim_that_is_being_written_is_one_and_no_damage(directory):
    lease_path(directory, 0, 1).touch()
    assert newest_leases(directory) == {}
    assert create_lease(directory, 0, 1, owner("n2"), LEASE_S) is None


def test_every_heartbeat_changes_the_lease_and_none_its_length_or_its_file(directory):
    held = create_lease(directory, 2, 1, owner("n" * 500, job="slurm 17_2"), LEASE_S)
    path = lease_path(directory, 2, 1)
    contents, inode = [path.read_bytes()], path.stat().st_ino
    for _ in range(3):
        assert held.beat()
        contents.append(path.read_bytes())
    held.release()
    contents.append(path.read_bytes())
    held.close()
    assert len(set(contents)) == 5
    assert {len(content) for content in contents} == {LEASE_BYTES}
    assert path.stat().st_ino == inode
    assert newest_leases(directory)[2].state == "released"


def test_a_disk_that_fails_for_less_than_half_a_lease_is_borne_and_for_longer_ends_the_claim(directory):
    now = [0.0]
    held = create_lease(directory, 0, 1, owner(), LEASE_S, lambda: now[0])

    def fail(**_changes):
        raise OSError(errno.EIO, "Input/output error")

    write, held._write = held._write, fail
    now[0] = LEASE_S * 0.4
    assert held.beat()
    held.check()
    held._write = write
    assert held.beat()
    held._write = fail
    now[0] += LEASE_S * 0.6
    held._write = write
    assert not held.beat()
    with pytest.raises(LostClaimError, match=r"could not renew its claim for 7 s; nothing more of it is written"):
        held.check()
    held.close()


def test_an_owner_that_was_taken_over_learns_it_at_its_next_check(directory):
    first = create_lease(directory, 0, 1, owner(), LEASE_S)
    second = create_lease(directory, 0, 2, owner("n2"), LEASE_S)
    with pytest.raises(LostClaimError, match="another process has taken it over"):
        first.check()
    first.release()
    assert newest_leases(directory)[0].node == "n2"
    second.check()
    for held in (first, second):
        held.close()


def test_the_block_of_a_dead_process_of_this_boot_is_free_at_once_and_of_another_host_after_its_lease(directory):
    create_lease(directory, 0, 1, owner(boot="here"), LEASE_S).close()  # as the end of its process does
    create_lease(directory, 1, 1, owner(boot="there"), LEASE_S).close()
    now = [0.0]
    watch = LeaseWatch(directory, lambda: now[0], "here")
    assert (watch.look(0), watch.look(1)) == ("dead", "unknown")
    now[0] = LEASE_S - 0.1
    assert watch.look(1) == "unknown"
    now[0] = LEASE_S + 0.1
    assert watch.look(1) == "dead"


def test_an_owner_on_another_host_is_alive_as_soon_as_a_heartbeat_is_seen_whatever_its_clock_says(directory):
    held = create_lease(directory, 0, 1, owner("n9", boot="there", job="slurm 17_3"), LEASE_S)
    watch = LeaseWatch(directory, lambda: 0.0, "here")
    assert watch.look(0) == "unknown"
    held.beat()
    assert watch.look(0) == "alive"
    with pytest.raises(ClaimedError, match=rf"block 0 .* process {os.getpid()} on n9 \(slurm 17_3\); wait until"):
        try_claim(directory, 0, owner(), LEASE_S, watch)
    held.release()
    held.close()
    assert watch.look(0) == "free"
