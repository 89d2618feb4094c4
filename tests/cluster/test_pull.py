"""A result directory of another machine comes whole, is continued, updated and verified, by real rsync."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli import benchctl
from support.ssh import fake_ssh, ssh_server

from benchctl.cluster.pull import parse_source
from benchctl.errors import UsageError
from benchctl.records.archive import contents_of
from benchctl.records.directory import ResultDirectory

EXAMPLE = Path(__file__).parents[2] / "results" / "example"
pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed here")


@pytest.fixture(name="remote")
def _remote(tmp_path: Path) -> Path:
    """A directory in the home of the other machine, with a link to it."""
    directory = tmp_path / "remote" / "results" / "topk" / "20260131T091500Z-1f2e3d4c"
    shutil.copytree(EXAMPLE, directory)
    (directory.parent / "latest").symlink_to(directory.name)
    return directory


@pytest.fixture(name="pull")
def _pull(tmp_path: Path, remote: Path):
    (tmp_path / "here").mkdir()
    programs = fake_ssh(tmp_path / "programs", tmp_path / "remote")

    def pull(*args: object, **env: str) -> "subprocess.CompletedProcess[str]":
        path = f"{programs}:{os.environ['PATH']}"
        return benchctl("pull", *args, cwd=tmp_path / "here", **{"PATH": path, **env})

    return pull


def contents(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in contents_of(directory).files}


def profile_of(directory: Path) -> str:
    return ResultDirectory(directory).manifest().profile


@pytest.mark.parametrize("path", ["results/topk/latest", "~/results/topk/20260131T091500Z-1f2e3d4c/", "{}"])
def test_a_directory_comes_whole_to_where_run_would_have_put_it(pull, remote, tmp_path, path):
    done = pull(f"login.cluster:{path.format(remote)}")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "here" / "results" / profile_of(EXAMPLE)
    (pulled,) = folder.iterdir()
    assert contents(pulled) == contents(remote)
    assert f"results/{profile_of(EXAMPLE)}/{pulled.name} is intact" in done.stdout
    assert done.stdout.splitlines()[-1] == benchctl("verify", remote).stdout.splitlines()[-1]
    listed = json.loads(benchctl("list", "--json", cwd=tmp_path / "here").stdout)
    assert [Path(entry["path"]).name for entry in listed["results"]] == [pulled.name]
    if "latest" not in path:
        assert pulled.name == remote.name


def test_a_second_pull_fetches_only_what_changed_and_removes_what_is_gone_but_no_report(pull, remote, tmp_path):
    run = min((remote / "runs").iterdir())
    (run / "attempt-1").mkdir()
    (run / "attempt-1" / "steps.jsonl").write_text("{}")
    assert pull("h:results/topk/latest", "copy").returncode == 0
    here = tmp_path / "here" / "copy"
    mine = [here / "notes.txt", here / "plots" / "mine.png", here / "export" / "vllm" / "a.json"]
    for path in (*mine, here / "runs" / run.name / "result.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (remote / "runs" / "999-new").mkdir()
    (remote / "runs" / "999-new" / "extra.jsonl").write_bytes(b"x" * 300_000)
    (run / "attempt-1" / "steps.jsonl").unlink()
    done = pull("h:results/topk/latest", "copy")
    assert done.returncode == 0, done.stdout
    assert "copy: 0.3 MB fetched" in done.stdout
    assert (here / "runs" / "999-new" / "extra.jsonl").stat().st_size == 300_000
    assert not (here / "runs" / run.name / "attempt-1" / "steps.jsonl").exists()
    assert [path.read_text() for path in mine] == ["mine"] * 3


def test_secrets_and_links_stay_there(pull, remote, tmp_path):
    run = next(iter(sorted((remote / "runs").iterdir())))
    for name in ("server.raw.log", "steps.safetensors", ".hidden", "x.partial"):
        (run / name).write_text("secret")
    (run / "gpu.link").symlink_to("/etc/passwd")
    (remote / "linked").symlink_to("/etc")
    assert pull("h:results/topk/latest", "copy").returncode == 0
    here = tmp_path / "here" / "copy"
    names = {path.name for path in here.rglob("*")} - {".verified.json"}
    assert not names & {"server.raw.log", "steps.safetensors", ".hidden", "x.partial", "gpu.link", "linked"}


def test_a_bit_flipped_at_the_source_is_named_with_exit_code_4(pull, remote):
    log = next(iter(sorted(remote.rglob("requests.jsonl"))))
    status = log.stat()
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    os.utime(log, ns=(status.st_atime_ns, status.st_mtime_ns))
    done = pull("h:results/topk/latest", "copy")
    assert done.returncode == 4
    assert str(log.relative_to(remote)) in done.stdout


def test_damage_here_with_the_size_and_time_of_the_original_is_repaired(pull, remote, tmp_path):
    assert pull("h:results/topk/latest", "copy").returncode == 0
    log = next(iter(sorted((tmp_path / "here" / "copy" / "runs").rglob("requests.jsonl"))))
    status = log.stat()
    log.write_bytes(log.read_bytes().replace(b"1", b"2", 1))
    os.utime(log, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert pull("h:results/topk/latest", "copy").returncode == 0
    assert contents(tmp_path / "here" / "copy") == contents(remote)


def test_an_interrupted_pull_keeps_what_came_and_goes_on(pull, remote, tmp_path):
    large = remote / "export" / "large.bin"
    large.parent.mkdir()
    large.write_bytes(os.urandom(6 << 20))
    argv = [sys.executable, "-m", "benchctl", "pull", "h:results/topk/latest", "copy", "--bwlimit", "1500"]
    env = {**os.environ, "PATH": f"{tmp_path / 'programs'}:{os.environ['PATH']}"}
    process = subprocess.Popen(argv, cwd=tmp_path / "here", env=env, stderr=subprocess.PIPE, text=True)
    here, temporary = tmp_path / "here" / "copy", "export/.large.bin.*"
    deadline_s = time.monotonic() + 60
    while not any(path.stat().st_size > 2 << 20 for path in here.glob(temporary)):
        assert time.monotonic() < deadline_s
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "what came is in copy" in stderr
    (kept,) = here.rglob(".rsync-partial/large.bin")
    assert (2 << 20) < kept.stat().st_size < (6 << 20)
    done = pull("h:results/topk/latest", "copy")
    assert done.returncode == 0, done.stderr
    assert contents(here) == contents(remote)
    fetched_mb = float(done.stdout.splitlines()[0].split(": ")[-1].split(" ")[0])
    assert fetched_mb < 4.5
    assert not list(here.rglob(".rsync-partial"))


def test_an_experiment_that_is_being_measured_is_pulled_and_said_to_be(pull, remote):
    manifest, last = remote / "manifest.json", max((remote / "runs").iterdir())
    manifest.write_text(manifest.read_text().replace('"state": "done"', '"state": "running"'))
    record = json.loads((last / "run.json").read_text())
    (last / "run.json").write_text(json.dumps(record | {"state": "running", "files": {}}))
    digests = json.loads((remote / "digests.json").read_text()) if (remote / "digests.json").exists() else {}
    digests.get("files", {}).pop(f"runs/{last.name}/run.json", None)
    if digests:
        (remote / "digests.json").write_text(json.dumps(digests))
    done = pull("h:results/topk/latest", "copy")
    assert done.returncode == 0, done.stdout + done.stderr
    num_runs = len(list((remote / "runs").iterdir()))
    assert f"{num_runs - 1} of {num_runs} runs are done; running: {last.name}; pull again" in done.stdout


def test_a_directory_of_another_experiment_is_not_overwritten(pull, remote, tmp_path):
    here = tmp_path / "here" / "copy"
    shutil.copytree(EXAMPLE, here)
    manifest = json.loads((here / "manifest.json").read_text())
    (here / "manifest.json").write_text(json.dumps(manifest | {"created_at": "2020-01-01T00:00:00Z"}))
    (tmp_path / "here" / "mine").mkdir()
    (tmp_path / "here" / "mine" / "thesis.tex").touch()
    for name, what in (("copy", "another experiment"), ("mine", "something else")):
        before = sorted((tmp_path / "here" / name).rglob("*"))
        done = pull("h:results/topk/latest", name)
        assert done.returncode == 2
        assert what in done.stderr
        assert sorted((tmp_path / "here" / name).rglob("*")) == before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("unreachable:results/x", "cannot be reached"),
        ("bare:results/x", "rsync is not installed there"),
        ("h:results/nothing", "name a directory that 'benchctl run' wrote there"),
        ("h:results", "name a directory that 'benchctl run' wrote there"),
        ("results/x", "is not HOST:DIR"),
        ("h:", "is not HOST:DIR"),
        ("h::module", "is not HOST:DIR"),
        ("-oProxyCommand=touch pwned:x", "is not HOST:DIR"),
    ],
)
def test_what_cannot_be_fetched_is_wrong_usage_with_a_remedy(pull, tmp_path, source, message):
    done = pull("--", source)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "here").iterdir())


def test_missing_programs_are_named_with_another_way(tmp_path):
    (tmp_path / "empty").mkdir()
    done = benchctl("pull", "h:x", cwd=tmp_path, PATH=str(tmp_path / "empty"))
    assert done.returncode == 2
    assert "rsync is not installed here" in done.stderr
    assert "--archive" in done.stderr


@pytest.mark.parametrize("name", ["a b", "-rf", "$(touch pwned)", "x;touch pwned", "é'\"*", "~root"])
def test_names_mean_themselves_on_the_other_machine(pull, remote, tmp_path, name):
    hostile = tmp_path / "remote" / name
    shutil.copytree(remote, hostile)
    done = pull(f"h:{name}", "copy")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "here" / "copy") == contents(remote)
    assert not list(tmp_path.rglob("pwned"))


def test_a_destination_with_a_dash_is_a_directory(pull, remote, tmp_path):
    assert pull("--", "h:results/topk/latest", "--delete").returncode == 0
    assert contents(tmp_path / "here" / "--delete") == contents(remote)


def test_a_profile_name_that_leads_elsewhere_is_refused(pull, remote, tmp_path):
    manifest = json.loads((remote / "manifest.json").read_text())
    (remote / "manifest.json").write_text(json.dumps(manifest | {"profile": "../../outside"}))
    done = pull("h:results/topk/latest")
    assert done.returncode == 4
    assert "name DEST yourself" in done.stderr
    assert not (tmp_path / "outside").exists()


def test_a_source_is_a_host_and_a_path():
    for text, host, path, name in (
        ("h:x/y/", "h", "x/y", "y"),
        ("me@login.cluster:/scratch/r", "me@login.cluster", "/scratch/r", "r"),
        ("[::1]:x:y", "[::1]", "x:y", "x:y"),
        ("h:~", "h", "./", "~"),
        ("h:-x", "h", "./-x", "-x"),
    ):
        source = parse_source(text)
        assert (source.host, source.remote_path, source.name) == (host, path, name)
    for text in ("", ":x", "h", "h:", "h::m", "-h:x", "me@-h:x", "a b:x", "h:x\ny", "rsync://h/x", "a/b:c"):
        with pytest.raises(UsageError):
            parse_source(text)


@pytest.mark.skipif(
    shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") is None, reason="sshd is not installed here"
)
def test_a_real_ssh_server_serves_a_pull(remote, tmp_path):
    with ssh_server(tmp_path / "server") as ssh:
        done = benchctl("pull", f"loopback:{remote}", tmp_path / "copy", "--ssh", ssh)
        assert done.returncode == 0, done.stderr
        assert contents(tmp_path / "copy") == contents(remote)
        missing = benchctl("pull", f"loopback:{remote}-none", tmp_path / "none", "--ssh", ssh)
        assert missing.returncode == 2
        assert "wrote there" in missing.stderr
    gone = benchctl("pull", f"loopback:{remote}", tmp_path / "copy", "--ssh", ssh)
    assert gone.returncode == 2
    assert "cannot be reached" in gone.stderr


@pytest.mark.slow
def test_an_experiment_can_be_pulled_again_and_again_while_it_is_measured(pull, tmp_path):
    argv = [sys.executable, "-m", "benchctl", "run", "ci-smoke", "--blocks", "2", "--quiet", "-o", "live"]
    settings = [*argv, "--set", "workload.num_prompts=4", "--set", "workload.output_len=16"]
    process = subprocess.Popen(settings, cwd=tmp_path / "remote", stdout=subprocess.DEVNULL)
    partly = 0
    while process.poll() is None:
        if (tmp_path / "remote" / "live" / "manifest.json").exists():
            done = pull("h:live", "copy")
            assert done.returncode == 0, done.stdout + done.stderr
            partly += "still being measured" in done.stdout
    assert process.returncode == 0
    assert partly
    done = pull("h:live", "copy")
    assert done.returncode == 0, done.stderr
    assert "still being measured" not in done.stdout
    assert contents(tmp_path / "here" / "copy") == contents(tmp_path / "remote" / "live")
