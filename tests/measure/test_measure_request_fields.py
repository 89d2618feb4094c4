"""Experiments whose requests carry fields and headers of the profile: no secret on disk, refusals told once."""

import json

from support import cli
from support.servers.openai_server import OpenAIServer, SentRequest
from support.servers.paced_engine import PacedEngine, planned, profile, request

from benchctl.measure.run import RunContext, measure_run
from benchctl.profile.sections import RequestOptions
from benchctl.records.directory import RunDirectory

SECRET = "not-to-be-written-anywhere-4711"
PLAIN = ("workload.num_prompts=4", "workload.samples_per_prompt=1", "workload.output_len=4", "telemetry.host_hz=0")


def run(directory, url, *settings, blocks=2, **env):
    changes = (f"engine.options.url={url}", *PLAIN, f"blocks={blocks}", *settings)
    options = [word for setting in changes for word in ("--set", setting)]
    words = ("run", "--profile", "aa", "--engine", "attach", "--quiet", *options)
    return cli.benchctl(*words, cwd=directory, **env, **cli.WITHOUT_PICTURES)


def runs_of(directory):
    paths = sorted(directory.glob("results/aa/latest/runs/*/run.json"))
    return [json.loads(path.read_text()) for path in paths]


def test_a_secret_is_sent_to_the_server_and_is_in_no_file_and_no_output(tmp_path):
    def refuse_one(sent: SentRequest):
        is_first = sent.headers["x-request-id"].endswith("0") and "again" in sent.headers["user-agent"]
        return (400, f"I do not like {sent.headers['x-team-key']}") if is_first else None

    with OpenAIServer(refuse=refuse_one).running() as server:
        done = run(
            tmp_path, server.url, "request.headers={X-Team-Key: 'key ${TEAM_KEY}', User-Agent: baseline}",
            "variants.again.request.headers.User-Agent=again", "load.workers=2", TEAM_KEY=SECRET,
        )  # fmt: skip
    assert {sent.headers["x-team-key"] for sent in server.requests} == {f"key {SECRET}"}
    assert [run["state"] for run in runs_of(tmp_path)].count("done") == 2
    files = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in done.stdout + done.stderr
    records = "".join(path.read_text() for path in files if path.name == "requests.jsonl")
    assert "I do not like key [redacted: TEAM_KEY]" in records
    assert "${TEAM_KEY}" in (tmp_path / "results/aa/latest/profile.yaml").read_text()
    config = runs_of(tmp_path)[0]["effective_config"]
    assert config["request.headers.X-Team-Key"] == "key ${TEAM_KEY}"


class Chatty(PacedEngine):
    """A server that writes to its log what is in a file: there the headers of requests."""

    def argv(self, settings, site):
        return ("sh", "-c", f'cat {self.truth.parent / "headers"}; exec "$@"', "sh", *super().argv(settings, site))


def test_a_secret_that_a_server_writes_to_its_log_is_not_kept_there_and_its_variable_is_not_passed_on(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_TEAM", SECRET)  # a variable of a server would be recorded
    (tmp_path / "headers").write_text(f"a header: X-Team: {SECRET}\n")
    asks = profile().model_copy(update={"request": RequestOptions(headers={"X-Team": "${VLLM_TEAM}"})})
    context = RunContext(profile=asks, requests=(request(0),), engine=Chatty(truth=tmp_path / "truth.jsonl"))
    directory = RunDirectory(tmp_path / "runs" / "000-b0-baseline")
    assert measure_run(context, planned(), directory).state in {"done", "suspect"}
    assert "a header: X-Team: [redacted: VLLM_TEAM]" in directory.server_log.read_text()
    files = [path for path in directory.path.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_missing_variable_ends_the_command_before_anything_is_written(tmp_path):
    done = run(tmp_path, "http://127.0.0.1:1", "request.headers={X-Key: '${NO_SUCH_KEY}'}")
    assert done.returncode == 2
    assert "--set: request.headers.X-Key: NO_SUCH_KEY is not set in the environment; export" in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_field_that_the_server_refuses_is_told_with_its_words_and_key_and_tried_once(tmp_path):
    def refuse(sent: SentRequest):
        return (400, "colour must be a number") if "colour" in sent.body else None

    with OpenAIServer(refuse=refuse).running() as server:
        done = run(tmp_path, server.url, "variants.again.request.extra_body.colour=red")
    assert done.returncode == 5
    by_variant = {name: [r for r in runs_of(tmp_path) if r["variant"] == name] for name in ("baseline", "again")}
    assert [r["state"] for r in by_variant["baseline"]] == ["done", "done"]
    first, second = by_variant["again"]
    assert (first["failure"]["cause"], second["failure"]["cause"]) == ("request-refused", "request-refused")
    assert "400: " in first["failure"]["message"]
    assert "colour must be a number" in first["failure"]["message"]
    assert "correct what the profile puts into them: request.extra_body.colour" in first["failure"]["message"]
    assert (
        f"not tried, because the server refused the same requests in {first['run_id']}"
        in second["failure"]["message"]
    )
    assert sum("colour" in sent.body for sent in server.requests) == 1


def test_an_experiment_ends_when_the_requests_of_every_arm_are_refused_in_a_stream_or_before(tmp_path):
    """As vLLM refuses a bad schema: 200, and the code that it would have answered in an error event."""
    for refuses_in_stream in (False, True):
        cwd = tmp_path / str(refuses_in_stream)
        cwd.mkdir()
        refusing = OpenAIServer(refuse=lambda _: (404, "no model nope"), refuses_in_stream=refuses_in_stream)
        with refusing.running() as server:
            done = run(cwd, server.url, "request.model=nope", blocks=4)
        assert done.returncode == 5
        assert "no model nope" in done.stdout + done.stderr
        assert len(server.requests) == 2
        assert [r["failure"]["cause"] for r in runs_of(cwd)] == ["request-refused"] * 2


def test_a_field_that_the_server_does_not_describe_is_warned_of(tmp_path):
    with OpenAIServer(fields=("prompt", "priority")).running() as server:
        run(tmp_path, server.url, "variants.again.request.extra_body={priority: 1, priorty: 1}", blocks=1)
    messages = [
        w["message"] for r in runs_of(tmp_path) for w in r["warnings"] if w["code"] == "request-field-unknown"
    ]
    (message,) = messages
    assert message.endswith("does not have request.extra_body.priorty: it may ignore them silently")
