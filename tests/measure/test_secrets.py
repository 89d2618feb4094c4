"""Secrets that servers print and die with, and that requests carry: none is on disk, in an output or on a page."""

import json

import httpx
import pytest
from support.cli import benchctl, in_process, printed
from support.servers.openai_server import OpenAIServer, SentRequest
from support.servers.paced_engine import PacedEngine, planned, profile, request
from support.servers.stubborn_engine import SERVER, StubbornEngine

from benchctl.errors import RunError
from benchctl.measure.measured_run import MeasuredRun
from benchctl.measure.redaction import redact_file
from benchctl.measure.run import RunContext, measure_run
from benchctl.profile.sections import RequestOptions
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.schema import ResultWarning
from benchctl.untrusted.secrets import environment_redactor

KNOWN = "opensesame/4711+opensesame"
SECRETS = (KNOWN, "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0dF", "sk-proj-" + "aB3dE6gH9jK2_mN5pQ8sT-1vW4yZ7bC0dF")
KEY = "sk-abcdefghijklmnopqrstuvwx"
SENT = "not-to-be-written-anywhere-4711"
PLAIN = ("workload.num_prompts=4", "workload.samples_per_prompt=1", "workload.output_len=4", "telemetry.host_hz=0")


class Leaking(StubbornEngine):
    """The engine of a server that prints, sends and dies with secrets."""

    def argv(self, settings, site):
        python, _, *rest = super().argv(settings, site)
        return (python, str(SERVER.with_name("leaking_server.py")), "--secrets", "secrets", *rest)

    def env(self, settings, site):
        return {}


@pytest.fixture(name="leaked")
def _leaked(tmp_path, monkeypatch, without_pictures):
    """Measures a leaking server; exit code and output."""
    (tmp_path / "secrets").write_text("\n".join(SECRETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEAM_TOKEN", KNOWN)
    small = ("num_prompts=6", "output_len=4", "num_warmups=1", "samples_per_prompt=1")
    words = [word for setting in small for word in ("--set", f"workload.{setting}")]

    def leaked(*flags, options=()):
        engine = Leaking(truth=tmp_path / "truth.jsonl", flags=flags, essential_processes=())
        monkeypatch.setattr("benchctl.engines.engine.load_name", lambda _: lambda: engine)
        code, out, err = in_process("run", "--profile", "aa", "--blocks", "1", *words, *options)
        return code, out + err

    return leaked


def holding(cwd, *secrets):
    """The files of results below ``cwd`` that hold a secret."""
    files = [path for path in (cwd / "results").rglob("*") if path.is_file()]
    return {path.name for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)}


@pytest.mark.parametrize("flags", [(), ("--dies",)])
def test_no_secret_of_a_server_is_in_any_file_or_output(tmp_path, leaked, flags):
    code, said = leaked(*flags)
    directory = tmp_path / "results/aa/latest"
    show = printed("show", directory)
    assert not [secret for secret in SECRETS if secret in said + show]
    assert "Traceback" not in said
    assert (directory / "report.html").is_file()
    assert holding(tmp_path, *SECRETS) == set()
    log = next((directory / "runs").glob("*baseline/server.log")).read_bytes()
    long_line = b"x" * 1_000_000 + b'"[redacted: TEAM_TOKEN]"' + b"y" * 1_000_000
    assert (long_line in log, log.count(b"\n\xff\xfe ")) == (True, len(SECRETS))
    record = json.loads(next((directory / "runs").glob("*baseline/run.json")).read_text())
    assert all(record["redactions"][label] >= 6 for label in ("TEAM_TOKEN", "Hugging Face token", "API key"))
    assert record["effective_config"]["server.api_key"] == "[redacted: api_key]"
    assert "secrets were replaced in what the servers wrote: " in " ".join(show.split())
    if flags:
        assert code == 5
        assert record["failure"]["log_tail"].count("@hub.example/x?token=[redacted: ") == len(SECRETS)


def test_a_raw_log_that_is_kept_is_the_only_place_of_a_secret_and_comes_with_a_warning(tmp_path, leaked):
    _, said = leaked(options=("--keep-raw-logs",))
    assert "raw-log-kept" in said
    assert holding(tmp_path, *SECRETS) == {"server.raw.log"}
    for raw in tmp_path.glob("results/aa/latest/runs/*/server.raw.log"):
        assert raw.stat().st_mode & 0o777 == 0o600
        raw.unlink()
    printed("verify", tmp_path / "results/aa/latest")


def test_every_text_of_a_run_record_is_written_without_secrets(tmp_path):
    run = MeasuredRun(profile(), planned(), RunDirectory(tmp_path / "r"))
    plain = {"server.bos_token": "<s>", "server.max_tokens": "12345678", "server.n": 3}
    run.update(effective_config={"server.api_key": "tiny", "server.note": [f"uses {KEY}"], **plain})
    run.warn(ResultWarning(code="port-held", message=f"GET http://u:p4ss@host/?token={KEY}"))
    error = httpx.ConnectError(f"cannot reach https://me:hunter2hunter2@host/v1?api_key={KEY}")
    with pytest.raises((httpx.ConnectError, RunError)), run.begun():
        raise error
    text = (tmp_path / "r" / "run.json").read_text()
    assert not [secret for secret in (KEY, "p4ss", "hunter2") if secret in text]
    record = RunDirectory(tmp_path / "r").read()
    redacted = {"server.api_key": "[redacted: api_key]", "server.note": ["uses [redacted: API key]"]}
    assert record.effective_config == redacted | plain
    assert record.failure.message.endswith(
        "cannot reach https://[redacted: password in a URL]@host/v1?api_key=[redacted: API key]"
    )


def test_a_file_that_the_server_wrote_is_rewritten_only_where_it_holds_a_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("TEAM_TOKEN", "opensesame-4711")
    path = tmp_path / "server.json"
    assert redact_file(path, environment_redactor()) == {}
    path.write_bytes(b'{"a": "opensesame-4711", "b": "\xff"}')
    assert redact_file(path, environment_redactor()) == {"TEAM_TOKEN": 1}
    assert path.read_bytes() == b'{"a": "[redacted: TEAM_TOKEN]", "b": "\xff"}'


def run(directory, url, *settings, blocks=2, **env):
    changes = (f"engine.options.url={url}", *PLAIN, f"blocks={blocks}", *settings)
    options = [word for setting in changes for word in ("--set", setting)]
    words = ("run", "--profile", "aa", "--engine", "attach", "--quiet", *options)
    done = benchctl(*words, cwd=directory, **env)
    return done.returncode, done.stdout + done.stderr


def runs_of(directory, variant=""):
    paths = sorted(directory.glob(f"results/aa/latest/runs/*{variant}/run.json"))
    return [json.loads(path.read_text()) for path in paths]


def test_a_secret_is_sent_to_the_server_and_is_in_no_file_and_no_output(tmp_path):
    def refuse_one(sent: SentRequest):
        is_first = sent.headers["x-request-id"].endswith("0") and "again" in sent.headers["user-agent"]
        return (400, f"I do not like {sent.headers['x-team-key']}") if is_first else None

    with OpenAIServer(refuse=refuse_one).running() as server:
        _, said = run(
            tmp_path, server.url, "request.headers={X-Team-Key: 'key ${TEAM_KEY}', User-Agent: baseline}",
            "variants.again.request.headers.User-Agent=again", "load.workers=2", TEAM_KEY=SENT,
        )  # fmt: skip
    assert {sent.headers["x-team-key"] for sent in server.requests} == {f"key {SENT}"}
    runs = runs_of(tmp_path)
    assert [run["state"] for run in runs].count("done") == 2
    assert (holding(tmp_path, SENT), SENT in said) == (set(), False)
    records = "".join(path.read_text() for path in tmp_path.glob("results/aa/2*/runs/*/requests.jsonl"))
    assert "I do not like key [redacted: TEAM_KEY]" in records
    assert "${TEAM_KEY}" in (tmp_path / "results/aa/latest/profile.yaml").read_text()
    assert runs[0]["effective_config"]["request.headers.X-Team-Key"] == "key ${TEAM_KEY}"


class Chatty(PacedEngine):
    """A server that writes to its log what is in a file: there the headers of requests."""

    def argv(self, settings, site):
        return ("sh", "-c", f'cat {self.truth.parent / "headers"}; exec "$@"', "sh", *super().argv(settings, site))


def test_a_secret_that_a_server_writes_to_its_log_is_not_kept_there_and_its_variable_is_not_passed_on(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_TEAM", SENT)  # a variable of a server would be recorded
    (tmp_path / "headers").write_text(f"a header: X-Team: {SENT}\n")
    asks = profile().model_copy(update={"request": RequestOptions(headers={"X-Team": "${VLLM_TEAM}"})})
    context = RunContext(
        profile=asks, requests=RequestSets.single((request(0),)), engine=Chatty(truth=tmp_path / "truth.jsonl")
    )
    directory = RunDirectory(tmp_path / "results" / "000-b0-baseline")
    assert measure_run(context, planned(), directory).state in {"done", "suspect"}
    assert "a header: X-Team: [redacted: VLLM_TEAM]" in directory.server_log.read_text()
    assert holding(tmp_path, SENT) == set()


def test_a_missing_variable_ends_the_command_before_anything_is_written(tmp_path):
    code, said = run(tmp_path, "http://127.0.0.1:1", "request.headers={X-Key: '${NO_SUCH_KEY}'}")
    assert code == 2
    assert "--set: request.headers.X-Key: NO_SUCH_KEY is not set in the environment; export" in said
    assert not (tmp_path / "results").exists()


def test_a_field_that_the_server_refuses_is_told_with_its_words_and_key_and_tried_once(tmp_path):
    def refuse(sent: SentRequest):
        return (400, "colour must be a number") if "colour" in sent.body else None

    with OpenAIServer(refuse=refuse).running() as server:
        assert run(tmp_path, server.url, "variants.again.request.extra_body.colour=red")[0] == 5
    assert [run["state"] for run in runs_of(tmp_path, "baseline")] == ["done", "done"]
    runs = runs_of(tmp_path, "again")
    assert [run["failure"]["cause"] for run in runs] == ["request-refused"] * 2
    first, second = (run["failure"]["message"] for run in runs)
    for text in ("400: ", "number", "correct what the profile puts into them: request.extra_body.colour"):
        assert text in first
    assert f"not tried, because the server refused the same requests in {runs[0]['run_id']}" in second
    assert sum("colour" in sent.body for sent in server.requests) == 1


def test_an_experiment_ends_when_the_requests_of_every_arm_are_refused_in_a_stream_or_before(tmp_path):
    """As vLLM refuses a bad schema: 200, and the code that it would have answered in an error event."""
    for in_stream in (False, True):
        cwd = tmp_path / str(in_stream)
        cwd.mkdir()
        refusing = OpenAIServer(refuse=lambda _: (404, "no model nope"), refuses_in_stream=in_stream)
        with refusing.running() as server:
            code, said = run(cwd, server.url, "request.model=nope", blocks=4)
        assert (code, "no model nope" in said, len(server.requests)) == (5, True, 2)
        assert [run["failure"]["cause"] for run in runs_of(cwd)] == ["request-refused"] * 2


def test_a_field_that_the_server_does_not_describe_is_warned_of(tmp_path):
    with OpenAIServer(fields=("prompt", "priority")).running() as server:
        run(tmp_path, server.url, "variants.again.request.extra_body={priority: 1, priorty: 1}", blocks=1)
    warnings = [warning for run in runs_of(tmp_path) for warning in run["warnings"]]
    (message,) = (each["message"] for each in warnings if each["code"] == "request-field-unknown")
    assert message.endswith("does not have request.extra_body.priorty: it may ignore them silently")
