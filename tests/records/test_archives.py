"""An archive is the same file for the same directory, and is imported as that directory or not at all."""

import fcntl
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from support.cli import in_process

from benchctl.errors import RecordError, UsageError
from benchctl.records import archive as archives
from benchctl.records.archive import contents_of, import_archive
from benchctl.records.directory import open_results
from benchctl.records.integrity import verify_directory

EXAMPLE = Path(__file__).parents[2] / "results" / "example"


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    return shutil.copytree(EXAMPLE, tmp_path / "example")


@pytest.fixture(name="exported", scope="module")
def _exported(tmp_path_factory) -> Path:
    """The archive of the example."""
    path = tmp_path_factory.mktemp("exported") / "x.tar.gz"
    export(EXAMPLE, path)
    return path


def imported(archive: Path) -> Path:
    return import_archive(archive, archive.parent / "imported" / "x", archive.parent)


def ended(*words: object, code: int = 0) -> str:
    """All that a command says, which ends with ``code``."""
    actual, *said = in_process(*words)
    assert actual == code, said
    return "".join(said)


def export(directory: Path, archive: Path, *options: str, code: int = 0) -> str:
    return ended("export", directory, "--archive", archive, *options, code=code)


def entry(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def packed(path: Path, *members: tarfile.TarInfo, content: bytes = b"") -> Path:
    """An archive of the manifest of an experiment and of ``members``, each with ``content``."""
    manifest = (EXAMPLE / "manifest.json").read_bytes()
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(entry("x/manifest.json", size=len(manifest)), io.BytesIO(manifest))
        for info in members:
            archive.addfile(info, io.BytesIO(content))
    return path


def test_an_archive_is_the_same_file_for_a_copy_with_other_times_owners_and_readers(directory, exported, tmp_path):
    for path in sorted(directory.rglob("*"), reverse=True):  # made in another order, and read since
        if path.is_file():
            target = tmp_path / "elsewhere" / path.relative_to(tmp_path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            target.chmod(0o600)
    copy = tmp_path / "elsewhere" / "example"
    (copy / ".verified.json").write_text("{}")
    export(copy, tmp_path / "b.tar.gz")
    assert exported.read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    with tarfile.open(exported, "r:gz") as archive:
        members = archive.getmembers()
    assert {(each.uid, each.gid, each.uname, each.gname, each.mode) for each in members} == {(0, 0, "", "", 0o644)}
    assert [member.name for member in members] == sorted(member.name for member in members)


def test_secrets_copies_and_what_is_being_written_stay_out(directory, tmp_path):
    run = next(path for path in (directory / "runs").iterdir() if path.is_dir())
    unwanted = {"server.raw.log", "steps.safetensors", ".run.json.partial", "x.partial", ".verified.json", "a.pkl"}
    for name in unwanted:
        (run / name).write_text("secret")
    (run / "elsewhere").symlink_to("/etc/passwd")
    assert f"left out: runs/{run.name}/elsewhere" in export(directory, tmp_path / "x.tar.gz")
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert names & {*unwanted, "elsewhere", "run.json"} == {"run.json"}


def test_an_experiment_that_is_being_measured_is_refused_unless_it_may_be_cut(directory, tmp_path):
    manifest = directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"state": "done"', '"state": "running"'))
    holder = os.open(directory, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    told = export(directory, tmp_path / "x.tar.gz", code=2)
    assert [text for text in ("is being measured", "--allow-running") if text not in told] == []
    assert not (tmp_path / "x.tar.gz").exists()
    export(directory, tmp_path / "x.tar.gz", "--allow-running")
    os.close(holder)
    export(directory, tmp_path / "y.tar.gz")  # of a process that died


def test_an_archive_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    target = tmp_path / "there.tar.gz"
    target.mkdir()
    assert "choose another file" in export(EXAMPLE, target, code=2)
    assert "ends in .tar.gz" in export(EXAMPLE, tmp_path / "x.zip", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["there.tar.gz"]


@pytest.mark.parametrize("name", ["b\\x", "b\nx", "b\x1b[1mx"])
def test_a_directory_of_any_name_is_archived_so_that_it_opens(directory, tmp_path, name):
    named = directory.rename(tmp_path / name)
    (named / "runs" / "a\nb").mkdir()
    (named / "runs" / "a\nb" / "c").write_text("x")
    assert "left out: runs/a\\nb/c of " in export(named, tmp_path / "x.tar.gz")
    ended("show", imported(tmp_path / "x.tar.gz"))
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        assert {member.split("/")[0] for member in archive.getnames()} == {"results"}


def test_altered_directories_are_archived_and_imported_as_they_are_and_named(directory, tmp_path):
    """The time of a file in an archive is its author's word: content is compared with digests."""
    (directory / ".verified.json").write_text("not ours")
    subprocess.run(["tar", "-C", str(directory), "-czf", str(tmp_path / "plain.tar.gz"), "."], check=True)
    opened = imported(tmp_path / "plain.tar.gz")  # which tar made of the folder itself
    assert not (opened / ".verified.json").exists()
    assert not verify_directory(opened).alterations
    steps = next((directory / "runs").rglob("steps.jsonl"))
    status = steps.stat()
    steps.write_bytes(steps.read_bytes().replace(b"1", b"2", 1))
    assert "steps.jsonl has other content" in export(directory, tmp_path / "x.tar.gz", code=4)
    ended("import", "archive", tmp_path / "x.tar.gz", "-o", tmp_path / "copy", code=4)
    os.utime(steps, ns=(status.st_atime_ns, status.st_mtime_ns))
    tar = ["tar", "--format=pax", "-C", str(tmp_path), "-czf", str(tmp_path / "y.tar.gz"), "example"]
    subprocess.run(tar, check=True)
    shutil.rmtree(tmp_path / "imported")
    alterations = verify_directory(imported(tmp_path / "y.tar.gz")).alterations
    assert [alteration.kind for alteration in alterations] == ["altered-file"]


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


def test_hostile_entries_are_refused_and_nothing_is_written_outside(tmp_path):
    for name, info in HOSTILE.items():
        archive = packed(tmp_path / f"{name}.tar.gz", info)
        with pytest.raises(RecordError, match=name):
            imported(archive)
        archive.unlink()
        assert not Path("/tmp/escaped").exists()
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], name


def test_bombs_are_refused_before_they_fill_the_disk(tmp_path, monkeypatch):
    large = packed(tmp_path / "bomb.tar.gz", entry("x/requests.jsonl", size=40 << 20), content=bytes(40 << 20))
    many = packed(tmp_path / "many.tar.gz", *(entry(f"x/{number}") for number in range(30)))
    long = packed(tmp_path / "long.tar.gz", entry("x/long", pax_headers={"comment": "x" * (1 << 20)}))
    for name, bound, archive, problem in (
        ("ARCHIVE_RATIO_FREE_BYTES", 1 << 20, large, r"at most [0-9,]+ are taken"),
        ("ARCHIVE_BYTES", 1 << 20, large, "at most 1,048,576"),
        ("ARCHIVE_ENTRIES", 20, many, "more than 20 entries"),
        ("ARCHIVE_ENTRIES", archives.ARCHIVE_ENTRIES, long, "a header has more than"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(archives, name, bound)
            with pytest.raises(RecordError, match=problem):
                imported(archive)


def test_an_archive_cut_anywhere_or_with_a_flipped_bit_is_damaged_and_a_file_that_is_none_is_wrong_usage(
    exported, tmp_path
):
    content = exported.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    cuts = (0, 1, 600, len(content) // 3, len(content) - 513, len(content) - 1)
    path = tmp_path / "damaged.tar.gz"
    for damaged in (*(content[:cut] for cut in cuts), flipped):
        path.write_bytes(damaged)
        with pytest.raises(RecordError, match=rf"{path.name}.*copy or export it again"):
            imported(path)
    for name, error in (("notes.txt", UsageError), ("notes.tar.gz", RecordError)):
        (tmp_path / name).write_text("not an archive")
        with pytest.raises(error, match=name):
            imported(tmp_path / name)
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(entry("x/readme"), io.BytesIO())
    with pytest.raises(UsageError, match=path.name):
        imported(path)


def test_an_archive_is_imported_with_its_digest_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    archive = tmp_path / "x.tar.gz"
    exported = export(shutil.copytree(EXAMPLE, tmp_path / "example"), archive)
    for command in (["show"], ["compare"], ["report"], ["run", "--resume"], ["run", "--block", "0", "--into"]):
        assert f"benchctl import archive {archive}" in ended(*command, archive, code=2)
    told = ended("import", "archive", archive)
    profile = open_results(EXAMPLE).manifest().profile
    place = tmp_path / "results" / profile / "example"
    assert f"results in results/{profile}/example" in told
    assert len({text.splitlines()[-1] for text in (exported, told, ended("verify", EXAMPLE))}) == 1
    assert contents_of(place).files == contents_of(EXAMPLE).files
    ended("import", "archive", archive, code=2)
    assert [path.name for path in place.parent.iterdir()] == ["example"]
