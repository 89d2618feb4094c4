"""Records lose their secrets on the way to disk, whatever wrote them there."""

import httpx
import pytest
from support.servers.paced_engine import planned, profile

from benchctl.errors import RunError
from benchctl.measure.measured_run import MeasuredRun
from benchctl.measure.redaction import redact_file, redacted_tree
from benchctl.records.directory import RunDirectory
from benchctl.records.record import RunFailure
from benchctl.records.schema import ResultWarning
from benchctl.untrusted.secrets import Redactor, environment_redactor

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
