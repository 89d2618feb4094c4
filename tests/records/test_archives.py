"""An archive is the same file for the same directory, and opens as that directory or not at all."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from backports.zstd import ZstdFile
from support.cli import benchctl
from support.results.builders import write_results

from benchctl.analysis.step_time.observed import read_sources
from benchctl.api import compare, load_results
from benchctl.errors import RecordError, UsageError
from benchctl.records.archive import archive as opening
from benchctl.records.archive import archive as unpacking
from benchctl.records.archive.archive import archives_directory, contents_of, is_archive, opened_directory
from benchctl.records.directory import open_results
from benchctl.records.integrity.integrity import verify_directory
from benchctl.report.documents import document_of

EXAMPLE = Path(__file__).parents[2] / "results" / "example"
SUFFIXES = (".tar.zst", ".tar.gz", ".tar")
SIX = ({"baseline": 1.0, "guided": 1.1},) * 6


@pytest.fixture(name="cache", autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BENCHCTL_ARCHIVES_DIR", str(tmp_path / "cache"))
    opening._opened_once.cache_clear()
    return tmp_path / "cache"


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    return shutil.copytree(EXAMPLE, tmp_path / "example")


def export(directory: Path, archive: Path, *options: str, code: int = 0) -> str:
    done = benchctl("export", directory, "--archive", archive, *options)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def packed(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    """A plain archive of the manifest of an experiment and of ``members``."""
    manifest = (EXAMPLE / "manifest.json").read_bytes()
    with tarfile.open(path, "w") as archive:
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


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_archive_is_the_same_file_for_a_copy_with_other_times_owners_and_readers(directory, tmp_path, suffix):
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
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
    opens = {".tar.zst": ZstdFile, ".tar.gz": gzip.open, ".tar": Path.open}[suffix]
    with opens(first, "rb") as stream, tarfile.open(fileobj=io.BytesIO(stream.read())) as archive:
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
    printed = export(directory, tmp_path / "x.tar")
    assert f"left out: runs/{run.name}/elsewhere" in printed
    with tarfile.open(tmp_path / "x.tar") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert not names & {*unwanted, "elsewhere"}
    assert "run.json" in names


def test_the_last_line_is_the_digest_that_verify_tells(directory, tmp_path):
    printed = export(directory, tmp_path / "x.tar.zst")
    assert printed.splitlines()[-1] == benchctl("verify", directory).stdout.splitlines()[-1]
    assert benchctl("verify", tmp_path / "x.tar.zst").stdout.splitlines()[-1] == printed.splitlines()[-1]


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
        printed = export(directory, tmp_path / "x.tar.zst", code=2)
        assert "is being measured" in printed
        assert "--allow-running" in printed
        assert not (tmp_path / "x.tar.zst").exists()
        export(directory, tmp_path / "x.tar.zst", "--allow-running")
    finally:
        holder.communicate()
    export(directory, tmp_path / "y.tar.zst")  # of a process that died


def test_an_archive_that_cannot_be_written_leaves_nothing_behind(directory, tmp_path):
    target = tmp_path / "there.tar.zst"
    target.mkdir()
    assert "choose another file" in export(directory, target, code=2)
    assert "ends in .tar.zst" in export(directory, tmp_path / "x.zip", code=2)
    assert sorted(path.name for path in tmp_path.iterdir() if "tar" in path.name) == ["there.tar.zst"]


def test_an_altered_directory_is_archived_as_it_is_and_named(directory, tmp_path):
    steps = next((directory / "runs").rglob("steps.jsonl"))
    steps.write_bytes(steps.read_bytes().replace(b"1", b"2", 1))
    assert "steps.jsonl has other content" in export(directory, tmp_path / "x.tar.zst", code=4)
    assert benchctl("verify", tmp_path / "x.tar.zst").returncode == 4


def test_commands_say_of_an_archive_what_they_say_of_its_directory(directory, tmp_path):
    archive = tmp_path / "copy.tar.zst"
    export(directory, archive)
    variant = next(name for name in load_results(directory).results.plan.runs if name.variant != "baseline").variant
    for command in (
        ["show"],
        ["show", "--json"],
        ["compare"],
        ["compare", "--json"],
        ["verify"],
        ["verify", "--json"],
        ["list", "--json"],
        ["watch"],
        ["compare", f"{{}}:baseline {{}}:{variant}"],
    ):
        sides = command[1].split() if "{}" in command[-1] else ["{}"]
        options = [] if "{}" in command[-1] else command[1:]
        said = [
            benchctl(command[0], *(side.format(path) for side in sides), *options) for path in (directory, archive)
        ]
        texts = [
            (done.stdout + done.stderr).replace(str(path), "PATH").replace(" " * 2, "")
            for done, path in zip(said, (directory, archive), strict=True)
        ]
        assert texts[0] == texts[1], command
        assert said[0].returncode == said[1].returncode


@pytest.mark.slow
def test_the_report_of_an_archive_is_that_of_its_directory(directory, tmp_path):
    archive = tmp_path / "copy.tar.zst"
    export(directory, archive)
    written = [tmp_path / "of-directory", tmp_path / "of-archive"]
    for path, out in zip((directory, archive), written, strict=True):
        assert benchctl("report", path, "-o", out).returncode == 0
    files = {path.relative_to(written[0]) for path in written[0].rglob("*") if path.is_file()}
    assert files == {path.relative_to(written[1]) for path in written[1].rglob("*") if path.is_file()}
    assert files
    for file in files - {Path("sweep_summary.csv"), Path("sweep_summary.json"), Path("summary.json")}:
        assert (written[0] / file).read_bytes() == (written[1] / file).read_bytes(), file


def test_what_is_derived_from_an_archive_lies_beside_it_and_never_in_the_cache(directory, tmp_path, cache):
    archive = tmp_path / "copy.tar.zst"
    export(directory, archive)
    before = {path.name for path in opened_directory(archive).rglob("*")}
    shutil.rmtree(directory)
    assert benchctl("report", archive).returncode == 0
    assert (tmp_path / "copy-report" / "report.html").is_file()
    assert benchctl("export", archive, "--format", "vllm").returncode == 0
    assert (tmp_path / "copy-export" / "vllm").is_dir()
    assert {path.name for path in opened_directory(archive).rglob("*")} - before <= {
        "steps.safetensors",
        "requests.safetensors",
        ".verified.json",
    }


@pytest.mark.parametrize("name", ["b\\x", "b\nx", "b\x1b[1mx"])
def test_a_directory_of_any_name_is_archived_so_that_it_opens(directory, tmp_path, name):
    named = directory.rename(tmp_path / name)
    (named / "runs" / "a\nb").mkdir()
    (named / "runs" / "a\nb" / "c").write_text("x")
    written = export(named, tmp_path / "x.tar")
    assert "left out: runs/a\\nb/c of " in written
    assert benchctl("show", tmp_path / "x.tar").returncode == 0
    with tarfile.open(tmp_path / "x.tar") as archive:
        assert {member.split("/")[0] for member in archive.getnames()} == {"results"}


def test_an_archive_of_an_archive_is_the_same_file(directory, tmp_path):
    export(directory, tmp_path / "a.tar.gz")
    export(tmp_path / "a.tar.gz", tmp_path / "b.tar.zst")
    export(directory, tmp_path / "c.tar.zst")
    assert (tmp_path / "b.tar.zst").read_bytes() == (tmp_path / "c.tar.zst").read_bytes()


def test_the_python_interface_takes_archives(tmp_path):
    results = write_results(tmp_path / "six", block_factors=SIX)
    export(results.path, tmp_path / "six.tar.zst")
    loaded = load_results(tmp_path / "six.tar.zst")
    assert loaded.results.source == tmp_path / "six.tar.zst"
    assert [row.label for row in loaded.sweep] == [row.label for row in load_results(results.path).sweep]
    of_archive = compare(f"{tmp_path / 'six.tar.zst'}:baseline", f"{tmp_path / 'six.tar.zst'}:guided")
    of_directory = compare(f"{results.path}:baseline", f"{results.path}:guided")
    texts = [json.dumps(document_of(each)["cells"], sort_keys=True) for each in (of_archive, of_directory)]
    assert texts[0].replace("six.tar.zst", "six") == texts[1]
    assert len(read_sources([tmp_path / "six.tar.zst"]).observed) == len(read_sources([results.path]).observed) > 0


def test_an_archive_that_tar_made_of_the_folder_itself_opens_too(directory, tmp_path):
    (directory / ".verified.json").write_text("not ours")
    subprocess.run(["tar", "-C", str(directory), "-cf", str(tmp_path / "plain.tar"), "."], check=True)
    opened = opened_directory(tmp_path / "plain.tar")
    assert opened.name == "plain"
    assert not (opened / ".verified.json").exists()
    assert not verify_directory(opened, is_fresh=True).alterations


def test_a_file_whose_time_is_that_of_its_digest_is_read_all_the_same(directory, tmp_path):
    """The time of a file in an archive is its author's word: content is compared with digests."""
    steps = next((directory / "runs").rglob("steps.jsonl"))
    status = steps.stat()
    steps.write_bytes(steps.read_bytes().replace(b"1", b"2", 1))
    os.utime(steps, ns=(status.st_atime_ns, status.st_mtime_ns))
    subprocess.run(
        ["tar", "--format=pax", "-C", str(tmp_path), "-cf", str(tmp_path / "x.tar"), "example"], check=True
    )
    opened = opened_directory(tmp_path / "x.tar")
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
def test_hostile_entries_are_refused_and_nothing_is_written_outside(name, tmp_path, cache):
    archive = packed(tmp_path / "hostile.tar", (HOSTILE[name], b""))
    with pytest.raises(RecordError, match=r"hostile\.tar"):
        opened_directory(archive)
    assert not (tmp_path / "escaped").exists()
    assert not Path("/tmp/escaped").exists()
    assert not any(path.is_file() for path in cache.rglob("*"))


def test_a_bomb_is_refused_before_it_fills_the_disk(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz") as archive:
        archive.addfile(entry("x/manifest.json", size=2), io.BytesIO(b"{}"))
        info = entry("x/requests.jsonl", size=40 << 20)
        archive.addfile(info, io.BytesIO(bytes(40 << 20)))
    monkeypatch.setattr(unpacking, "ARCHIVE_RATIO_FREE_BYTES", 1 << 20)
    with pytest.raises(RecordError, match="times its size"):
        opened_directory(tmp_path / "bomb.tar.gz")
    monkeypatch.undo()
    monkeypatch.setattr(unpacking, "ARCHIVE_BYTES", 1 << 20)
    with pytest.raises(RecordError, match="at most 1,048,576"):
        opened_directory(tmp_path / "bomb.tar.gz")
    monkeypatch.undo()
    many = [(entry(f"x/{number}"), b"") for number in range(30)]
    monkeypatch.setattr(unpacking, "ARCHIVE_ENTRIES", 20)
    with pytest.raises(RecordError, match="more than 20 entries"):
        opened_directory(packed(tmp_path / "many.tar", *many))


def test_a_header_without_end_is_refused(tmp_path):
    long = entry("x/long", pax_headers={"comment": "x" * (1 << 20)})
    with tarfile.open(tmp_path / "long.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(long)
    with pytest.raises(RecordError, match="a header has more than"):
        opened_directory(tmp_path / "long.tar")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_archive_cut_anywhere_is_damaged(directory, tmp_path, suffix):
    shutil.rmtree(directory / "plots", ignore_errors=True)
    export(directory, tmp_path / f"x{suffix}")
    content = (tmp_path / f"x{suffix}").read_bytes()
    end = len(content) - (tarfile.RECORDSIZE if suffix == ".tar" else 0)  # zeros that no reader needs
    boundary = 512 + -(-(directory / "digests.json").stat().st_size // 512) * 512  # where a file ends
    for cut in (0, 1, boundary, len(content) // 3, end - 513, end - 1):
        path = tmp_path / f"cut{cut}{suffix}"
        path.write_bytes(content[:cut])
        with pytest.raises(RecordError) as caught:
            opened_directory(path)
        assert str(path) in str(caught.value)
        assert "copy or export it again" in str(caught.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_flipped_bit_in_an_archive_does_not_go_unnoticed(directory, tmp_path, suffix):
    export(directory, tmp_path / f"x{suffix}")
    content = bytearray((tmp_path / f"x{suffix}").read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / f"y{suffix}").write_bytes(content)
    try:
        results = open_results(tmp_path / f"y{suffix}")
    except RecordError:
        assert suffix != ".tar"  # which has no sums of its own: the digests notice
    else:
        flipped = contents_of(directory).files
        assert verify_directory(results.path, is_fresh=True).alterations or any("plots" in name for name in flipped)


def test_a_file_that_is_no_archive_is_wrong_usage_and_a_damaged_one_is_invalid(tmp_path):
    (tmp_path / "notes.txt").write_text("not an archive")
    (tmp_path / "notes.tar.zst").write_text("not an archive")
    with tarfile.open(tmp_path / "other.tar", "w") as archive:
        archive.addfile(entry("x/readme"), io.BytesIO())
    for name, code in (("notes.txt", 2), ("notes.tar.zst", 4), ("other.tar", 2)):
        done = benchctl("show", tmp_path / name)
        assert done.returncode == code, done.stderr
        assert name in done.stderr


def test_an_experiment_is_not_continued_inside_an_archive(directory, tmp_path):
    export(directory, tmp_path / "x.tar.zst")
    for options in (["--resume"], ["--block", "0", "--into"]):
        done = benchctl("run", *options, tmp_path / "x.tar.zst")
        assert done.returncode == 2
        assert f"benchctl import archive {tmp_path / 'x.tar.zst'}" in done.stderr
    imported = benchctl("import", "archive", tmp_path / "x.tar.zst", cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    profile = open_results(directory).manifest().profile
    place = tmp_path / "results" / profile / "example"
    assert f"results in results/{profile}/example" in imported.stdout
    assert contents_of(place).files == contents_of(directory).files
    assert benchctl("import", "archive", tmp_path / "x.tar.zst", cwd=tmp_path).returncode == 2
    assert [path.name for path in place.parent.iterdir()] == ["example"]


def test_processes_that_open_one_archive_at_a_time_all_read_it(directory, tmp_path, cache):
    export(directory, tmp_path / "x.tar.zst")
    code = (
        "import sys\nfrom pathlib import Path\nfrom benchctl.records.archive.archive import opened_directory\n"
        "sys.stdin.readline()\nprint(opened_directory(Path(sys.argv[1])))"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "x.tar.zst")]
    readers = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for reader in readers:
        reader.stdin.write("go\n")
        reader.stdin.flush()
    opened = {reader.communicate(timeout=60)[0].strip() for reader in readers}
    assert [reader.returncode for reader in readers] == [0] * 4
    (path,) = opened
    assert contents_of(Path(path)).files == contents_of(directory).files
    assert [each.name for each in cache.iterdir()] == [Path(path).parent.name]


def test_a_cache_keeps_what_is_used_and_loses_what_is_old_or_was_left_by_a_crash(directory, tmp_path, cache):
    export(directory, tmp_path / "old.tar")
    old = opened_directory(tmp_path / "old.tar").parent
    left = cache / ".0123-abc.partial"
    left.mkdir()
    for path in (old / "complete.json", left):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    export(directory, tmp_path / "new.tar.gz")
    new = opened_directory(tmp_path / "new.tar.gz").parent
    assert sorted(path.name for path in archives_directory().iterdir()) == [new.name]
    (new / "complete.json").unlink()  # of a crash of the machine
    opening._opened_once.cache_clear()
    assert (opened_directory(tmp_path / "new.tar.gz").parent / "complete.json").is_file()


def test_a_cache_that_cannot_be_written_is_named_with_the_variable_that_moves_it(directory, tmp_path, monkeypatch):
    export(directory, tmp_path / "x.tar.zst")
    monkeypatch.setenv("BENCHCTL_ARCHIVES_DIR", str(tmp_path / "x.tar.zst" / "cache"))
    with pytest.raises(UsageError, match="BENCHCTL_ARCHIVES_DIR"):
        opened_directory(tmp_path / "x.tar.zst")


def test_only_regular_files_are_archives(directory, tmp_path):
    os.mkfifo(tmp_path / "fifo.tar")
    assert not is_archive(tmp_path / "fifo.tar")
    assert not is_archive(directory)
    assert not is_archive(tmp_path / "missing.tar.zst")
    assert not is_archive(Path("x" * 5000))
