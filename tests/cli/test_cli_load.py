"""``benchctl load``: the load generator alone, against real servers over real HTTP."""

import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support import cli
from support.servers.handler_server import handled_by
from support.servers.simulator import sim_server

from benchctl.engines.attach import AttachOptions, PlainOpenAi
from benchctl.errors import UnsupportedError
from benchctl.profile.load import parse_profile
from benchctl.profile.model import Sampling, VariantSettings
from benchctl.records.loaded import load_results
from benchctl.records.record import Message, PreparedRequest
from benchctl.workload.tokenizers import count_chat_tokens, count_tokens

KEY = "not-to-be-written-anywhere-0815"


def benchctl(cwd: Path, *args: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return cli.benchctl(*args, cwd=cwd, timeout_s=60, **environment)


def only_load(cwd: Path) -> Path:
    (path,) = [path for path in (cwd / "results" / "load").iterdir() if not path.is_symlink()]
    return path


def result_of(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "runs" / "000-b0-load" / "result.json").read_text()))


@dataclass
class Answers:
    """A server that answers with the tokens asked for, or with 500 where its number is among ``failing``."""

    failing: frozenset[int] = frozenset()
    models: tuple[str, ...] = ("theirs",)
    delay_s: float = 0.0
    tokens_per_word: int = 1
    """Tokens that it counts where the rule of benchctl counts one."""
    asked: list[tuple[dict[str, Any], str | None]] = field(default_factory=list)
    """Body and key of each request for an answer."""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        number = len(self.asked)
        self.asked.append((body, handler.headers["authorization"]))
        if number in self.failing:
            handler.send_error(500, "out of order")
            return
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.end_headers()
        for i in range(body["max_tokens"]):
            time.sleep(self.delay_s)
            choice = {"index": 0, "text": f" w{i}", "finish_reason": None}
            if i + 1 == body["max_tokens"]:
                choice["finish_reason"] = "length"
            self.event(handler, {"choices": [choice]})
        prompt_tokens = self.count(body) * self.tokens_per_word
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": body["max_tokens"]}
        self.event(handler, {"choices": [], "usage": usage})
        handler.wfile.write(b"data: [DONE]\n\n")

    def count(self, body: dict[str, Any]) -> int:
        """Tokens of the prompt by the rule that plans them."""
        if "messages" in body:
            return count_chat_tokens([Message(**message) for message in body["messages"]])
        return count_tokens(body["prompt"])

    def event(self, handler: BaseHTTPRequestHandler, event: dict[str, Any]) -> None:
        handler.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextmanager
def answering(answers: Answers) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            offered = json.dumps({"data": [{"id": name} for name in answers.models]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(offered)))
            self.end_headers()
            self.wfile.write(offered)

        def do_POST(self) -> None:
            if self.path == "/tokenize":  # OpenAI's API counts no prompts
                self.send_error(404)
            else:
                answers.answer(self)

        def log_message(self, *args: object) -> None:
            pass

    with handled_by(Handler) as url:
        yield url


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """A load on the simulator, whose own counters are the truth."""
    cwd = tmp_path_factory.mktemp("loaded")
    args = ["--num-prompts", "24", "--max-concurrency", "8", "--input-len", "20", "--output-len", "12"]
    with sim_server(cwd / "server") as server:
        done = benchctl(cwd, "load", str(server.client.base_url), *args, "--num-warmups", "0")
        (cwd / "generated").write_text(str(server.metric("vllm:generation_tokens_total")))
    return cwd, done


def test_a_load_ends_with_tables_and_with_a_directory_that_show_reads(
    loaded: tuple[Path, "subprocess.CompletedProcess[str]"],
) -> None:
    cwd, done = loaded
    assert done.returncode == 0, done.stderr
    assert "24 completed, 0 failed" in done.stdout
    for name in ("TTFT", "TPOT", "ITL", "end to end", "send lag"):
        assert name in done.stdout
    assert "p99 needs 299 completed requests; there are 24" in done.stdout
    path = only_load(cwd)
    assert (path.parent / "latest").resolve() == path.resolve()
    shown = benchctl(cwd, "show", str(path))
    assert shown.returncode == 0, shown.stderr
    assert "1 of 1 runs done" in shown.stdout


def test_a_load_records_the_machine_of_its_client_and_no_device_of_the_server(
    loaded: tuple[Path, "subprocess.CompletedProcess[str]"],
) -> None:
    (record,) = only_load(loaded[0]).glob("runs/*/run.json")
    node = json.loads(record.read_text())["node"]
    assert node["hostname"] == platform.node()
    assert node["cores"]
    assert "gpus" not in node
    assert "build" not in node


def test_the_tokens_of_a_load_are_those_that_the_server_made(
    loaded: tuple[Path, "subprocess.CompletedProcess[str]"],
) -> None:
    cwd, _ = loaded
    result = result_of(only_load(cwd))
    assert result["total_output_tokens"] == 24 * 12 == float((cwd / "generated").read_text())
    assert result["completed"] == result["num_prompts"] == 24
    (run,) = load_results(only_load(cwd)).runs
    assert sum(request.completion_tokens or 0 for request in run.requests) == 24 * 12
    assert run.record.state == "done"
    assert result["model_id"] == run.record.effective_config["server.served_model"]


@pytest.mark.parametrize(("tokens_per_word", "state"), [(1, "done"), (2, "suspect")])
def test_a_server_that_counts_other_prompts_than_planned_makes_the_load_suspect(
    tmp_path: Path, tokens_per_word: int, state: str
) -> None:
    with answering(Answers(tokens_per_word=tokens_per_word)) as url:
        args = ["--num-prompts", "4", "--input-len", "50", "--output-len", "3", "--num-warmups", "0"]
        done = benchctl(tmp_path, "load", url, *args)
    (run,) = load_results(only_load(tmp_path)).runs
    assert run.record.state == state
    assert done.returncode == (0 if state == "done" else 4), done.stderr
    told = (
        "prompt-tokens-differ: the server counted 100.0 tokens in a prompt on average, and 50.0 were planned (by "
        "benchctl's own rule; ratio 2.000): 4 of 4 requests differ by more than 4 tokens and 2%"
    )
    assert (told in done.stderr) == (state == "suspect")


def test_figures_taken_in_passing_are_those_of_the_records_on_disk(
    loaded: tuple[Path, "subprocess.CompletedProcess[str]"],
) -> None:
    cwd, _ = loaded
    path = only_load(cwd)
    in_passing = result_of(path)
    assert benchctl(cwd, "report", str(path)).returncode == 0
    from_disk = result_of(path)
    assert "itls" not in in_passing
    assert len(from_disk["itls"]) == 24
    names = [name for name in in_passing if name.endswith(("_ms", "_throughput"))]
    names += ["duration", "completed", "failed", "total_input_tokens", "total_output_tokens"]
    for name in set(names) & set(from_disk):
        assert in_passing[name] == pytest.approx(from_disk[name]), name
    assert in_passing["client"] == pytest.approx(from_disk["client"])
    assert in_passing["mean_e2el_ms"] > 0  # the simulator may write all tokens of an answer within one read


def test_prompts_of_a_seed_are_the_same_bytes_and_no_two_begin_alike(tmp_path: Path) -> None:
    with answering(Answers()) as url:
        for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
            args = ["--num-prompts", "6", "--input-len", "30", "--output-len", "1", "--seed", seed, "-o", name]
            assert benchctl(tmp_path, "load", url, *args).returncode == 0
    sets = {name: (tmp_path / name / "requests.jsonl").read_bytes() for name in "abc"}
    assert sets["a"] == sets["b"] != sets["c"]
    prompts = [request.prompt or "" for request in load_results(tmp_path / "a").requests]
    assert len({prompt.split()[0] for prompt in prompts}) == 6
    assert {len(prompt.split()) for prompt in prompts} == {30}


@pytest.mark.parametrize(
    ("args", "kind", "rate"),
    [
        ([], "burst", "inf"),
        (["--max-concurrency", "2"], "closed-loop", "inf"),
        (["--request-rate", "200"], "poisson", 200),
        (["--request-rate", "200", "--burstiness", "4", "--max-concurrency", "2"], "gamma", 200),
        (["--request-rate", "inf", "--max-concurrency", "2"], "closed-loop", "inf"),
    ],
)
def test_rate_and_concurrency_say_when_requests_are_sent(
    tmp_path: Path, args: list[str], kind: str, rate: object
) -> None:
    with answering(Answers()) as url:
        done = benchctl(tmp_path, "load", url, "--num-prompts", "4", "--output-len", "2", *args, "-o", "out")
    assert done.returncode == 0, done.stderr
    profile = parse_profile((tmp_path / "out" / "profile.yaml").read_text(), "profile.yaml")
    assert profile.workload.arrival.kind == kind
    assert result_of(tmp_path / "out")["request_rate"] == rate


def test_a_load_is_split_over_processes_on_request(tmp_path: Path) -> None:
    with answering(Answers()) as url:
        args = ["--num-prompts", "6", "--output-len", "2", "--workers", "2", "-o", "out", "--max-concurrency", "2"]
        done = benchctl(tmp_path, "load", url, *args)
    assert done.returncode == 0, done.stderr
    assert result_of(tmp_path / "out")["completed"] == 6


def test_an_unnamed_model_is_the_one_that_the_server_offers_and_warm_ups_are_in_no_number(tmp_path: Path) -> None:
    answers = Answers()
    with answering(answers) as url:
        args = ["--num-prompts", "2", "--output-len", "3", "--num-warmups", "2", "--no-ignore-eos", "--json"]
        done = benchctl(tmp_path, "load", url, *args)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["total_output_tokens"] == 6
    assert document["model_id"] == "theirs"
    assert [body["model"] for body, _ in answers.asked] == ["theirs"] * 4
    assert not any("ignore_eos" in body for body, _ in answers.asked)


def test_failed_requests_stay_in_the_counts_and_make_a_load_suspect(tmp_path: Path) -> None:
    with answering(Answers(failing=frozenset({2, 3}))) as url:
        args = ["--num-prompts", "5", "--max-concurrency", "1", "--output-len", "2", "-o", "out"]
        done = benchctl(tmp_path, "load", url, *args, "--num-warmups", "0")
    assert done.returncode == 4, done.stderr
    assert "3 completed, 2 failed (2 http-status)" in done.stdout
    assert "2 of 5 requests failed" in done.stderr
    result = result_of(tmp_path / "out")
    assert (result["num_prompts"], result["failed"], result["state"]) == (5, 2, "suspect")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["state"] == "suspect"


def test_a_load_of_which_nothing_completes_has_failed(tmp_path: Path) -> None:
    with answering(Answers(failing=frozenset(range(9)))) as url:
        args = ["--num-prompts", "3", "--output-len", "2", "--num-warmups", "0", "-o", "out"]
        done = benchctl(tmp_path, "load", url, *args)
    assert done.returncode == 5
    assert "no-request-completed" in done.stderr


def test_where_nobody_answers_the_load_is_not_even_sent(tmp_path: Path) -> None:
    done = benchctl(tmp_path, "load", "http://127.0.0.1:9", "--num-prompts", "1000", "-o", "out")
    assert done.returncode == 5
    assert "no load was sent" in done.stderr
    assert "Traceback" not in done.stderr
    (run,) = load_results(tmp_path / "out").runs
    assert run.record.state == "failed"
    assert all(request.is_warmup for request in run.requests)


def test_the_key_reaches_the_server_and_no_file(tmp_path: Path) -> None:
    answers = Answers()
    with answering(answers) as url:
        args = ["--num-prompts", "1", "--output-len", "1", "--api-key-env", "THEIR_KEY", "-o", "out"]
        done = benchctl(tmp_path, "load", url, *args, THEIR_KEY=KEY)
        without = benchctl(tmp_path, "load", url, *args[:-1], "other")
    assert done.returncode == 0, done.stderr
    assert {key for _, key in answers.asked} == {f"Bearer {KEY}"}
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert without.returncode == 2
    assert "THEIR_KEY" in without.stderr


def test_a_command_line_of_vllm_bench_serve_is_understood(tmp_path: Path) -> None:
    with sim_server(tmp_path / "server") as server:
        args = (
            f"--backend vllm --base-url {server.client.base_url} --endpoint /v1/completions --dataset-name random "
            "--random-input-len 40 --random-output-len=6 --num-prompts 8 --request-rate inf --max-concurrency 4 "
            "--ignore-eos --seed 3 --save-result --result-dir saved --result-filename run.json --disable-tqdm "
            "--percentile-metrics ttft,tpot --metric-percentiles 50,99 --goodput ttft:60000 e2el:0.001 "
            "--temperature 0 --label first --header User-Agent=mine --extra-body {}"
        )
        done = benchctl(tmp_path, "load", *args.split())
    assert done.returncode == 0, done.stderr
    assert "goodput        0 of 8 requests (0.0%): TTFT <= 60000 ms and end to end <= 0.001 ms" in done.stdout
    saved = json.loads((tmp_path / "saved" / "run.json").read_text())
    assert saved == result_of(only_load(tmp_path))
    assert (saved["completed"], saved["total_output_tokens"], saved["label"]) == (8, 48, "first")
    assert (saved["request_goodput"], saved["goodput"]["num_good"]) == (0.0, 0)
    profile = parse_profile((only_load(tmp_path) / "profile.yaml").read_text(), "profile.yaml")
    assert profile.sampling.temperature == 0
    assert profile.request.headers == {"User-Agent": "mine"}
    assert profile.engine.options["dialect"] == "vllm"


def test_goodput_counts_the_requests_that_keep_every_limit_and_failed_ones_in_the_denominator(
    tmp_path: Path,
) -> None:
    with answering(Answers(failing=frozenset({1}))) as url:
        args = [
            "--num-prompts",
            "4",
            "--output-len",
            "3",
            "--num-warmups",
            "0",
            "--goodput",
            "e2el:60000",
            "--json",
        ]
        done = benchctl(tmp_path, "load", url, *args)
    document = json.loads(done.stdout)
    assert document["goodput"] == {"limits_ms": {"e2el": 60000.0}, "num_good": 3, "share": 0.75}
    assert document["request_goodput"] == pytest.approx(3 / document["duration"])


def test_an_interrupt_keeps_what_came(tmp_path: Path) -> None:
    with answering(Answers(delay_s=0.05)) as url:
        argv = [sys.executable, "-m", "benchctl", "load", url, "--max-concurrency", "2", "--output-len", "20"]
        with subprocess.Popen([*argv, "-o", "out"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            records = tmp_path / "out" / "runs" / "000-b0-load" / "requests.jsonl"
            deadline = time.monotonic() + 120
            while not (records.exists() and records.read_bytes().count(b"\n") > 2):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "interrupted; results until now are kept. Show them with: benchctl show out" in stderr
    (run,) = load_results(tmp_path / "out").runs
    assert run.record.failure is not None
    assert run.record.failure.cause == "interrupted"
    assert len(run.requests) > 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ftp://127.0.0.1:8000"], "write an address that begins with http:// or https://"),
        (["127.0.0.1:9", "--extra-body", "{"], "--extra-body is not JSON"),
        (["127.0.0.1:9", "--header", "plain"], "--header plain: write NAME=VALUE"),
        (["127.0.0.1:9", "--goodput", "itl:5"], "--goodput itl:5: expected ttft, tpot, e2el with a limit in ms"),
        (["127.0.0.1:9", "--goodput", "ttft:fast"], "'fast' is not a number; write milliseconds: ttft:200"),
        (["http://127.0.0.1:9", "--burstiness", "2"], "--request-rate"),
        (["http://127.0.0.1:9", "--request-rate", "-1"], "request_rate"),
        (["http://127.0.0.1:9", "--num-prompts", "0"], "num-prompts"),
        (["http://127.0.0.1:9", "--workers", "many"], "workers"),
        (["http://127.0.0.1:9", "--workers", "-1"], "it must be at least 1"),
        (["http://127.0.0.1:many"], "a port from 1 to 65535"),
        (["http://127.0.0.1:9", "--dataset-name", "gsm8k"], "benchctl data fetch gsm8k"),
        (["http://127.0.0.1:9", "--dataset-name", "synthetic"], "input_len"),
        (["http://127.0.0.1:9", "--output", "taken"], "taken"),
        (["http://127.0.0.1:9", "--output", "a-file/below"], "a-file"),
        (["http://127.0.0.1:9", "--dialect", "klingon"], "klingon"),
    ],
)
def test_bad_input_gets_one_clear_message(tmp_path: Path, args: list[str], says: str) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "something").write_text("")
    (tmp_path / "a-file").write_text("")
    done = benchctl(tmp_path, "load", *args)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_load_of_a_plain_server_imports_no_numpy_before_its_end_and_no_engine_that_it_does_not_speak_to(
    tmp_path: Path,
) -> None:
    code = (
        "import sys\nfrom benchctl.cli.app import app\n"
        "from benchctl.measure import sending\nread = sending.load_run\n"
        "def read_back(directory):\n    print('imported', *sys.modules, file=sys.stderr)\n"
        "    return read(directory)\n"
        "sending.load_run = read_back\napp(prog_name='benchctl')\n"
    )
    with answering(Answers()) as url:
        args = ["load", url, "--num-prompts", "1", "--output-len", "1"]
        done = subprocess.run(
            [sys.executable, "-c", code, *args], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("imported ")]
    imported = set(line.split())
    assert {"benchctl.measure.sending", "httpx"} <= imported
    arrays = {"numpy", "scipy", "vl_convert", "pandas"}
    assert not imported & {*arrays, "aiohttp", "prometheus_client", "pynvml", "tqdm"}
    assert not imported & {
        "benchctl.engines.sim.engine",
        "benchctl.engines.vllm",
    }


def test_the_plain_dialect_asks_for_nothing_beyond_the_published_api() -> None:
    server = AttachOptions(url="http://127.0.0.1:1", dialect="openai", served_model="theirs")
    settings = VariantSettings(variant="v", model="m", server=server, sampling=Sampling(), guidance=None)
    asked = PreparedRequest(
        request_id="r", index=0, arrival_ns=0, prompt="Hi", prompt_tokens=2, max_tokens=4, seed=3, source="test"
    )
    body = json.loads(PlainOpenAi().request_call(asked, settings).body)
    published = {"model", "n", "seed", "temperature", "top_p", "stream", "stream_options", "max_tokens", "prompt"}
    assert set(body) == published
    with pytest.raises(UnsupportedError, match="top_k"):
        PlainOpenAi().check_requests([asked], settings.model_copy(update={"sampling": Sampling(top_k=5)}))
