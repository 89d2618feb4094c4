"""An archive is the same file for the same directory, and is imported as that directory or not at all."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.cli import benchctl

from benchctl.errors import RecordError, UsageError
from benchctl.records import archive as archives
from benchctl.records.archive import contents_of, import_archive
from benchctl.records.directory import open_results
from benchctl.records.integrity import verify_directory

EXAMPLE = Path(__file__).parents[2] / "results" / "example"


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    return shutil.copytree(EXAMPLE, tmp_path / "example")


def imported(archive: Path) -> Path:
    return import_archive(archive, archive.parent / "imported" / "x", archive.parent)


def export(directory: Path, archive: Path, *options: str, code: int = 0) -> str:
    done = benchctl("export", directory, "--archive", archive, *options)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def packed(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    """An archive of the manifest of an experiment and of ``members``."""
    manifest = (EXAMPLE / "manifest.json").read_bytes()
    with tarfile.open(path, "w:gz") as archive:
        for info, content in ((tarfile.TarInfo("x/manifest.json"), manifest), *members):
            if info.isreg() and not info.size:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def entry(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def test_an_archive_is_the_same_file_for_a_copy_with_other_times_owners_and_readers(directory, tmp_path):
    first, second = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    export(directory, first)
    benchctl("show", directory)
    copy = tmp_path / "elsewhere" / "example"
    copy.parent.mkdir()
    for path in sorted(directory.rglob("*"), reverse=True):  # made in another order, and read since
        if path.is_file():
            target = copy / path.relative_to(directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            target.chmod(0o600)
    (copy / ".verified.json").write_text("{}")
    export(copy, second)
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first, "r:gz") as archive:
        members = archive.getmembers()
    assert {(member.uid, member.gid, member.uname, member.gname, member.mode) for member in members} == {
        (0, 0, "", "", 0o644)
    }
    assert [member.name for member in members] == sorted(member.name for member in members)


def test_secrets_copies_and_what_is_being_written_stay_out(directory, tmp_path):
    run = next(path for path in (directory / "runs").iterdir() if path.is_dir())
    unwanted = ("server.raw.log", "steps.safetensors", ".run.json.partial", "x.partial", ".verified.json", "a.pkl")
    for name in unwanted:
        (run / name).write_text("secret")
    (run / "elsewhere").symlink_to("/etc/passwd")
    printed = export(directory, tmp_path / "x.tar.gz")
    assert f"left out: runs/{run.name}/elsewhere" in printed
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert not names & {*unwanted, "elsewhere"}
    assert "run.json" in names


def test_the_last_line_is_the_digest_that_verify_tells(directory, tmp_path):
    printed = export(directory, tmp_path / "x.tar.gz")
    assert printed.splitlines()[-1] == benchctl("verify", directory).stdout.splitlines()[-1]
    done = benchctl("import", "archive", tmp_path / "x.tar.gz", "-o", tmp_path / "copy")
    assert done.stdout.splitlines()[-1] == printed.splitlines()[-1]


def test_an_experiment_that_is_being_measured_is_refused_unless_it_may_be_cut(directory, tmp_path):
    code = (
        "import fcntl, os, sys\nf = os.open(sys.argv[1], os.O_RDONLY)\nfcntl.flock(f, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\nsys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(directory)]
    holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    manifest = directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"state": "done"', '"state": "running"'))
    assert '"running"' in manifest.read_text()
    try:
        printed = export(directory, tmp_path / "x.tar.gz", code=2)
        assert "is being measured" in printed
        assert "--allow-running" in printed
        assert not (tmp_path / "x.tar.gz").exists()
        export(directory, tmp_path / "x.tar.gz", "--allow-running")
    finally:
        holder.communicate()
    export(directory, tmp_path / "y.tar.gz")  # of a process that died


def test_an_archive_that_cannot_be_written_leaves_nothing_behind(directory, tmp_path):
    target = tmp_path / "there.tar.gz"
    target.mkdir()
    assert "choose another file" in export(directory, target, code=2)
    assert "ends in .tar.gz" in export(directory, tmp_path / "x.zip", code=2)
    assert sorted(path.name for path in tmp_path.iterdir() if "tar" in path.name) == ["there.tar.gz"]


def test_an_altered_directory_is_archived_as_it_is_and_named(directory, tmp_path):
    steps = next((directory / "runs").rglob("steps.jsonl"))
    steps.write_bytes(steps.read_bytes().replace(b"1", b"2", 1))
    assert "steps.jsonl has other content" in export(directory, tmp_path / "x.tar.gz", code=4)
    assert benchctl("import", "archive", tmp_path / "x.tar.gz", "-o", tmp_path / "copy").returncode == 4


@pytest.mark.parametrize("name", ["b\\x", "b\nx", "b\x1b[1mx"])
def test_a_directory_of_any_name_is_archived_so_that_it_opens(directory, tmp_path, name):
    named = directory.rename(tmp_path / name)
    (named / "runs" / "a\nb").mkdir()
    (named / "runs" / "a\nb" / "c").write_text("x")
    written = export(named, tmp_path / "x.tar.gz")
    assert "left out: runs/a\\nb/c of " in written
    assert benchctl("show", imported(tmp_path / "x.tar.gz")).returncode == 0
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        assert {member.split("/")[0] for member in archive.getnames()} == {"results"}


def test_an_archive_that_tar_made_of_the_folder_itself_opens_too(directory, tmp_path):
    (directory / ".verified.json").write_text("not ours")
    subprocess.run(["tar", "-C", str(directory), "-czf", str(tmp_path / "plain.tar.gz"), "."], check=True)
    opened = imported(tmp_path / "plain.tar.gz")
    assert not (opened / ".verified.json").exists()
    assert not verify_directory(opened).alterations


def test_a_file_whose_time_is_that_of_its_digest_is_read_all_the_same(directory, tmp_path):
    """The time of a file in an archive is its author's word: content is compared with digests."""
    steps = next((directory / "runs").rglob("steps.jsonl"))
    status = steps.stat()
    steps.write_bytes(steps.read_bytes().replace(b"1", b"2", 1))
    os.utime(steps, ns=(status.st_atime_ns, status.st_mtime_ns))
    subprocess.run(
        ["tar", "--format=pax", "-C", str(tmp_path), "-czf", str(tmp_path / "x.tar.gz"), "example"], check=True
    )
    opened = imported(tmp_path / "x.tar.gz")
    assert [alteration.kind for alteration in verify_directory(opened).alterations] == ["altered-file"]


HOSTILE = {
    "parent": entry("../escaped"),
    "inner-parent": entry("x/../../escaped"),
    "absolute": entry("/tmp/escaped"),
    "backslash": entry("x\\..\\escaped"),
    "control": entry("x/\x1b[31m"),
    "symlink": entry("x/link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hardlink": entry("x/hard", type=tarfile.LNKTYPE, linkname="x/manifest.json"),
    "device": entry("x/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    "fifo": entry("x/fifo", type=tarfile.FIFOTYPE),
    "sparse": entry("x/sparse", type=tarfile.GNUTYPE_SPARSE),
    "duplicate": entry("x/manifest.json"),
    "below-a-file": entry("x/manifest.json/plan.json"),
    "deep": entry("/".join(["x", *"abcdefghijklmnopqrst"])),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_entries_are_refused_and_nothing_is_written_outside(name, tmp_path):
    archive = packed(tmp_path / "hostile.tar.gz", (HOSTILE[name], b""))
    with pytest.raises(RecordError, match="hostile"):
        imported(archive)
    assert not (tmp_path / "escaped").exists()
    assert not Path("/tmp/escaped").exists()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["hostile.tar.gz"]


def test_a_bomb_is_refused_before_it_fills_the_disk(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz") as archive:
        archive.addfile(entry("x/manifest.json", size=2), io.BytesIO(b"{}"))
        info = entry("x/requests.jsonl", size=40 << 20)
        archive.addfile(info, io.BytesIO(bytes(40 << 20)))
    monkeypatch.setattr(archives, "ARCHIVE_RATIO_FREE_BYTES", 1 << 20)
    with pytest.raises(RecordError, match=r"at most [0-9,]+ are taken"):
        imported(tmp_path / "bomb.tar.gz")
    monkeypatch.undo()
    monkeypatch.setattr(archives, "ARCHIVE_BYTES", 1 << 20)
    with pytest.raises(RecordError, match="at most 1,048,576"):
        imported(tmp_path / "bomb.tar.gz")
    monkeypatch.undo()
    many = [(entry(f"x/{number}"), b"") for number in range(30)]
    monkeypatch.setattr(archives, "ARCHIVE_ENTRIES", 20)
    with pytest.raises(RecordError, match="more than 20 entries"):
        imported(packed(tmp_path / "many.tar.gz", *many))


def test_a_header_without_end_is_refused(tmp_path):
    long = entry("x/long", pax_headers={"comment": "x" * (1 << 20)})
    with tarfile.open(tmp_path / "long.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(long)
    with pytest.raises(RecordError, match="a header has more than"):
        imported(tmp_path / "long.tar.gz")


def test_an_archive_cut_anywhere_is_damaged(directory, tmp_path):
    shutil.rmtree(directory / "plots", ignore_errors=True)
    export(directory, tmp_path / "x.tar.gz")
    content = (tmp_path / "x.tar.gz").read_bytes()
    for cut in (0, 1, 600, len(content) // 3, len(content) - 513, len(content) - 1):
        path = tmp_path / f"cut{cut}.tar.gz"
        path.write_bytes(content[:cut])
        with pytest.raises(RecordError) as caught:
            imported(path)
        assert str(path) in str(caught.value)
        assert "copy or export it again" in str(caught.value)


def test_a_flipped_bit_in_an_archive_is_damage(directory, tmp_path):
    export(directory, tmp_path / "x.tar.gz")
    content = bytearray((tmp_path / "x.tar.gz").read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / "y.tar.gz").write_bytes(content)
    with pytest.raises(RecordError, match="damaged"):
        imported(tmp_path / "y.tar.gz")


def test_a_file_that_is_no_archive_of_results_is_wrong_usage_and_a_damaged_one_is_invalid(tmp_path):
    (tmp_path / "notes.txt").write_text("not an archive")
    (tmp_path / "notes.tar.gz").write_text("not an archive")
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as archive:
        archive.addfile(entry("x/readme"), io.BytesIO())
    for name, error in (("notes.txt", UsageError), ("notes.tar.gz", RecordError), ("other.tar.gz", UsageError)):
        with pytest.raises(error, match=name):
            imported(tmp_path / name)


def test_an_archive_is_imported_before_it_is_read(directory, tmp_path):
    archive = tmp_path / "x.tar.gz"
    export(directory, archive)
    for command in (["show"], ["compare"], ["report"], ["run", "--resume"], ["run", "--block", "0", "--into"]):
        done = benchctl(*command, archive)
        assert done.returncode == 2, command
        assert f"benchctl import archive {archive}" in done.stderr
    first = benchctl("import", "archive", archive, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    profile = open_results(directory).manifest().profile
    place = tmp_path / "results" / profile / "example"
    assert f"results in results/{profile}/example" in first.stdout
    assert contents_of(place).files == contents_of(directory).files
    assert benchctl("import", "archive", archive, cwd=tmp_path).returncode == 2
    assert [path.name for path in place.parent.iterdir()] == ["example"]
