"""Refusals of the operating system: the cause on record, the sentence for the user, and claims on directories."""

import errno
import fcntl
import os
import resource
import threading

import msgspec
import pytest
from support.results.builders import write_results
from support.servers.paced_engine import planned, profile

from benchctl.errors import RunError, UsageError, as_usage_error, system_failure
from benchctl.measure.measured_run import MeasuredRun
from benchctl.measure.server.health import limit_in_log, start_refusal
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.files import read_document
from benchctl.records.loaded import load_results
from benchctl.records.writers import current_manifest, is_held, sole_writer
from benchctl.report.export import list_directories

REFUSALS = [
    (errno.EMFILE, "too-many-open-files", "ulimit -n 65536"),
    (errno.ENFILE, "too-many-open-files", "fs.file-max"),
    (errno.ENOMEM, "out-of-memory", "memory"),
    (errno.EAGAIN, "too-many-processes", "ulimit -u"),
    (errno.ENOSPC, "disk-full", "free space there"),
    (errno.EDQUOT, "disk-quota", "free space within the quota"),
    (errno.EFBIG, "file-too-large", "ulimit -f unlimited"),
    (errno.EROFS, "read-only", "make it writable"),
    (errno.EACCES, "no-permission", "correct the permissions"),
    (errno.EPERM, "no-permission", "correct the permissions"),
    (errno.EIO, "disk-error", "dmesg"),
    (errno.ENAMETOOLONG, "name-too-long", "shorter name"),
]


def ended_by(path, error):
    """The error with which a run ends in which ``error`` is raised, and its record on disk."""
    directory = RunDirectory(path / "runs" / "r")
    run = MeasuredRun(profile(), planned(), directory)
    with pytest.raises(RunError) as caught, run.begun():
        raise error
    return caught.value, directory.read()


def test_a_remedy_for_places_that_cannot_be_written_to_is_none_for_full_disks_and_limits():
    for number, advice in (
        (errno.ENOSPC, "free space there, or name another directory"),
        (
            errno.EMFILE,
            "raise the limit: ulimit -n 65536, in a container --ulimit nofile=65536, or lower max_concurr",
        ),
        (errno.EROFS, "copy it"),
    ):
        assert f"; {advice}" in str(as_usage_error(OSError(number, os.strerror(number)), "r", remedy="copy it"))


def test_a_limit_of_open_files_is_not_told_as_a_damaged_file(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            read_document(tmp_path / "manifest.json", within=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "raise the limit: ulimit -n 65536" in str(as_usage_error(caught.value, ""))
    assert str(caught.value.filename) == str(tmp_path / "manifest.json")


def test_each_refusal_has_its_cause_on_record_and_its_remedy(tmp_path):
    for number, cause, remedy in REFUSALS:
        raised, record = ended_by(tmp_path / str(number), OSError(number, os.strerror(number), "file.json"))
        assert (raised.exit_code, raised.cause, record.state, record.failure.cause) == (5, cause, "failed", cause)
        assert str(raised).startswith("file.json: ")
        assert remedy in str(raised)
        assert str(raised).endswith(", then continue with --resume; what was measured is kept")
        assert "kept" not in str(as_usage_error(OSError(number, os.strerror(number)), "file.json"))


def test_a_refusal_in_the_words_of_python_is_recognised_and_other_errors_are_none(tmp_path):
    for number, (error, cause) in enumerate(
        (
            (MemoryError(), "out-of-memory"),
            (RuntimeError("can't start new thread"), "too-many-processes"),
            (ImportError("x.so: failed to map segment from shared object"), "out-of-memory"),
            (ImportError("x.so: cannot open shared object file: Too many open files"), "too-many-open-files"),
            (OSError("words of a library"), "system-error"),
        )
    ):
        assert ended_by(tmp_path / str(number), error)[1].failure.cause == cause
    for error in (
        KeyError("x"),
        RuntimeError("other"),
        ImportError("No module"),
        BlockingIOError(11, "a full pipe"),
    ):
        assert system_failure(error) is None


def test_the_log_of_a_server_names_a_limit_and_a_program_that_is_missing_is_to_be_installed():
    assert limit_in_log("OSError: [Errno 24] Too many open files\n").cause == "too-many-open-files"
    assert limit_in_log("MemoryError\nOSError: [Errno 28] No space left on device\n").cause == "disk-full"
    assert limit_in_log("KeyError: 'x'\n") is None
    missing = start_refusal("vllm", FileNotFoundError(2, "No such file or directory", "vllm"))
    assert missing.cause == "cannot-start"
    assert "install the engine" in str(missing)
    lacking = start_refusal("vllm", OSError(24, "Too many open files"))
    assert lacking.cause == "too-many-open-files"
    assert "install" not in str(lacking)


def abandoned(path):
    """Results whose process is gone: manifest and one run say that they are in progress."""
    write_results(path, block_factors=({"baseline": 1.0, "guided": 1.0},) * 2)
    results = ResultDirectory(path)
    results.write_manifest(msgspec.structs.replace(results.manifest(), state="running"))
    run = results.runs()[-1]
    run.write(msgspec.structs.replace(run.read(), state="running"))
    return results


def test_results_of_a_process_that_is_gone_are_shown_as_interrupted_and_those_of_a_living_one_as_running(tmp_path):
    results = abandoned(tmp_path / "r")
    assert list_directories(tmp_path)[0]["state"] == "interrupted"
    loaded = load_results(results.path)
    assert loaded.manifest.state == "interrupted"
    assert loaded.runs[-1].record.failure.cause == "interrupted"
    with sole_writer(results.path):
        assert is_held(results.path)
        assert list_directories(tmp_path)[0]["state"] == "running"
        assert load_results(results.path).runs[-1].record.state == "running"
    assert results.manifest().state == "running"
    assert current_manifest(results).state == "interrupted"


def test_a_reader_that_looks_does_not_keep_a_writer_out(tmp_path):
    """A look holds the lock for a moment, and the writer tries again."""
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    looking = threading.Timer(0.05, os.close, (handle,))
    looking.start()
    with sole_writer(tmp_path):
        pass
    looking.join()
    with sole_writer(tmp_path), pytest.raises(UsageError, match="another benchctl is measuring"):
        sole_writer(tmp_path).__enter__()
