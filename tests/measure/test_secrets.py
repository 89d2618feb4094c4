"""A server that prints, sends and dies with secrets: none is in a result directory, in an output or on a page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.servers.paced_engine import planned, profile
from support.servers.programs.leaking_server import HALF_LINE_BYTES

from benchctl.errors import RunError
from benchctl.measure.measured_run import MeasuredRun
from benchctl.measure.redaction import redact_file, redacted_tree
from benchctl.records.directory import RunDirectory
from benchctl.records.record import RunFailure
from benchctl.records.schema import ResultWarning
from benchctl.untrusted.secrets import Redactor, environment_redactor

HERE = Path(__file__).parents[1]
BENCHCTL = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
from dataclasses import dataclass, replace

from benchctl.profile.engine_table import ENGINES
from support.servers.paced_engine import PacedEngine

PROGRAM = {str(HERE / "support/servers/programs/leaking_server.py")!r}

@dataclass(frozen=True)
class Engine(PacedEngine):
    def argv(self, settings, site):
        return (sys.executable, PROGRAM, "--port", str(site.port), "--secrets", "secrets", *FLAGS)

    def env(self, settings, site):
        return {{}}

FLAGS = sys.argv.pop(1).split()

def engine():
    return Engine(truth=Path("truth.jsonl"))

ENGINES["sim"] = replace(ENGINES["sim"], implementation="__main__:engine")

from benchctl.cli import main
main()
"""
KNOWN = "opensesame/4711+opensesame"
SECRETS = (KNOWN, "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0dF", "sk-proj-" + "aB3dE6gH9jK2_mN5pQ8sT-1vW4yZ7bC0dF")


def benchctl(cwd, flags, *args, **env):
    return subprocess.run(
        [sys.executable, "-c", BENCHCTL, flags, *args],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def measure(cwd, flags, *options):
    (cwd / "secrets").write_text("\n".join(SECRETS))
    small = ("num_prompts=6", "output_len=4", "num_warmups=1", "samples_per_prompt=1")
    words = [word for setting in small for word in ("--set", f"workload.{setting}")]
    return benchctl(cwd, flags, "run", "--profile", "aa", "--blocks", "1", *words, *options, TEAM_TOKEN=KNOWN)


def holding(cwd):
    """The files of results below ``cwd`` that hold a secret."""
    files = [path for path in (cwd / "results").rglob("*") if path.is_file()]
    return {path.name for path in files if any(secret.encode() in path.read_bytes() for secret in SECRETS)}


@pytest.mark.parametrize("flags", ["", "--dies"])
def test_no_secret_of_a_server_is_in_any_file_or_output(tmp_path, flags):
    done = measure(tmp_path, flags)
    directory = tmp_path / "results/aa/latest"
    show = benchctl(tmp_path, flags, "show", str(directory))
    for output in (done, show):
        assert not [secret for secret in SECRETS if secret in output.stdout + output.stderr]
        assert "Traceback" not in output.stderr
    assert (directory / "report.html").is_file()
    assert holding(tmp_path) == set()
    log = next((directory / "runs").glob("*baseline/server.log")).read_bytes()
    assert b"x" * HALF_LINE_BYTES + b'"[redacted: TEAM_TOKEN]"' + b"y" * HALF_LINE_BYTES in log
    assert log.count(b"\n\xff\xfe ") == len(SECRETS)
    record = json.loads(next((directory / "runs").glob("*baseline/run.json")).read_text())
    assert all(record["redactions"][label] >= 6 for label in ("TEAM_TOKEN", "Hugging Face token", "API key"))
    assert record["effective_config"]["server.api_key"] == "[redacted: api_key]"
    assert "secrets were replaced in what the servers wrote: " in " ".join(show.stdout.split())
    if flags:
        assert done.returncode == 5
        assert record["failure"]["log_tail"].count("@hub.example/x?token=[redacted: ") == len(SECRETS)


def test_a_raw_log_that_is_kept_is_the_only_place_of_a_secret_and_comes_with_a_warning(tmp_path):
    done = measure(tmp_path, "", "--keep-raw-logs")
    directory = tmp_path / "results/aa/latest"
    assert holding(tmp_path) == {"server.raw.log"}
    raw = next((directory / "runs").glob("*baseline/server.raw.log"))
    assert raw.stat().st_mode & 0o777 == 0o600
    assert "raw-log-kept" in done.stdout
    for path in directory.glob("runs/*/server.raw.log"):
        path.unlink()
    verified = benchctl(tmp_path, "", "verify", str(directory))
    assert verified.returncode == 0, verified.stdout + verified.stderr


KEY = "sk-abcdefghijklmnopqrstuvwx"


@pytest.fixture
def run(tmp_path):
    return MeasuredRun(profile(), planned(), RunDirectory(tmp_path / "r"))


def test_every_text_of_a_run_record_is_written_without_secrets(run, tmp_path):
    run.update(effective_config={"server.api_key": "tiny", "server.note": [f"uses {KEY}"], "server.n": 3})
    run.warn(ResultWarning(code="port-held", message=f"GET http://u:p4ss@host/?token={KEY}"))
    run.close("failed", RunFailure(cause="x", message=f"Bearer {KEY}", log_tail=f"a\n{KEY}\n"))
    text = (tmp_path / "r" / "run.json").read_text()
    assert KEY not in text
    assert "p4ss" not in text
    config = RunDirectory(tmp_path / "r").read().effective_config
    assert config == {
        "server.api_key": "[redacted: api_key]",
        "server.note": ["uses [redacted: API key]"],
        "server.n": 3,
    }


def test_an_exception_that_ends_a_run_leaves_its_words_without_the_secrets_in_its_url(run):
    error = httpx.ConnectError(f"cannot reach https://me:hunter2hunter2@host/v1?api_key={KEY}")
    with pytest.raises((httpx.ConnectError, RunError)), run.begun():
        raise error
    assert run.record.failure.message.endswith(
        "cannot reach https://[redacted: password in a URL]@host/v1?api_key=[redacted: API key]"
    )


def test_settings_of_models_are_no_secrets():
    config = {"server.bos_token": "<s>", "server.max_tokens": "12345678", "server.tokenizer": "org/model-instruct"}
    assert redacted_tree(config, Redactor()) == config


def test_a_file_that_the_server_wrote_is_rewritten_only_where_it_holds_a_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("TEAM_TOKEN", "opensesame-4711")
    path = tmp_path / "server.json"
    assert redact_file(path, environment_redactor()) == {}
    path.write_bytes(b'{"a": "opensesame-4711", "b": "\xff"}')
    assert redact_file(path, environment_redactor()) == {"TEAM_TOKEN": 1}
    assert path.read_bytes() == b'{"a": "[redacted: TEAM_TOKEN]", "b": "\xff"}'
