"""``benchctl load``: the load generator alone, against real servers over real HTTP."""

import json
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import benchctl, document, only_result, printed, refusal, started
from support.servers.openai_server import OpenAIServer
from support.servers.simulator import sim_server
from support.waiting import wait_until

from benchctl.cli.commands.load import translated
from benchctl.errors import UsageError
from benchctl.profile.load import parse_profile
from benchctl.records.loaded import load_results
from benchctl.records.warning_codes import CLIENT_SUSPECT_CODES, SUSPECT_CODES

KEY = "not-to-be-written-anywhere-0815"
RUN = Path("runs", "000-b0-load")


def result_of(path: Path):
    return json.loads((path / RUN / "result.json").read_text())


@pytest.fixture(scope="module", name="loaded")
def _loaded(tmp_path_factory) -> tuple[Path, str, float]:
    """A load on the simulator, what it printed, and the tokens by the counters of the server."""
    cwd = tmp_path_factory.mktemp("loaded")
    args = ["--num-prompts", "24", "--max-concurrency", "8", "--input-len", "20", "--output-len", "12"]
    with sim_server(cwd / "server") as server:
        output = printed("load", server.client.base_url, *args, "--num-warmups", "0", cwd=cwd)
        num_tokens = server.metric("vllm:generation_tokens_total")
    return only_result(cwd), output, num_tokens


def test_a_running_server_is_warmed_up_in_waves_and_its_slots_are_taken_over_or_a_beginning_is_left_out(tmp_path):
    lengths = ("--num-prompts", "20", "--input-len", "20", "--output-len", "6")
    with sim_server(tmp_path / "server") as server:
        url = server.client.base_url
        running = (
            "--max-concurrency",
            "4",
            "--begin",
            "running",
            "--warmup-waves",
            "3",
            "-o",
            tmp_path / "running",
        )
        printed("load", url, *lengths, *running, cwd=tmp_path)
        discarding = ("--request-rate", "200", "--discard", "0.25", "-o", tmp_path / "discarding")
        printed("load", url, *lengths, *discarding, cwd=tmp_path)
        told = refusal("load", url, *lengths, "--request-rate", "9", "--begin", "running", cwd=tmp_path)
    (run,), (late,) = (load_results(tmp_path / name).runs for name in ("running", "discarding"))
    assert run.record.warmup.source == "client"
    num_waves = len(run.record.warmup.waves)
    assert num_waves in {2, 3}
    assert (run.record.num_sent, sum(each.is_warmup for each in run.requests)) == (20, 1 + 4 * num_waves + 8)
    assert (late.record.num_sent, sum(each.is_warmup for each in late.requests)) == (15, 1 + 5)
    assert "--begin: is running" in told
    assert "set --discard instead" in told


def test_a_load_ends_with_tables_and_records_what_the_server_made_and_the_machine_of_its_client(loaded):
    path, output, num_tokens = loaded
    for text in (
        *("24 completed, 0 failed", "TTFT", "TPOT", "ITL", "end to end", "send lag"),
        "p99 needs 299 completed requests; there are 24",
    ):
        assert text in output
    assert "1 of 1 runs done" in printed("show", path)
    result = result_of(path)
    assert result["total_output_tokens"] == 24 * 12 == num_tokens
    assert result["completed"] == result["num_prompts"] == 24
    (run,) = load_results(path).runs
    assert sum(request.completion_tokens or 0 for request in run.requests) == 24 * 12
    assert (run.record.state, result["model_id"]) == ("done", run.record.effective_config["server.served_model"])
    assert run.record.node.hostname == platform.node()
    assert run.record.node.cores


def test_figures_taken_in_passing_are_those_of_the_records_on_disk(loaded):
    path, *_ = loaded
    in_passing = result_of(path)
    printed("report", path)
    from_disk = result_of(path)
    assert ("itls" in in_passing, len(from_disk["itls"])) == (False, 24)
    names = {name for name in in_passing if name.endswith(("_ms", "_throughput"))} & set(from_disk)
    for name in names | {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "client"}:
        assert in_passing[name] == pytest.approx(from_disk[name]), name
    assert in_passing["mean_e2el_ms"] > 0  # the simulator may write all tokens of an answer within one read


def test_a_server_that_counts_other_prompts_than_planned_makes_the_load_suspect(tmp_path):
    with OpenAIServer(tokens_per_word=2).running() as server:
        args = ["--num-prompts", "4", "--input-len", "50", "--output-len", "3", "--num-warmups", "0"]
        told = refusal("load", server.url, *args, cwd=tmp_path, code=4)
    assert (
        "prompt-tokens-differ: the server counted 100.0 tokens in a prompt on average, and 50.0 were planned (by "
        "benchctl's own rule; ratio 2.000): 4 of 4 requests differ by more than 4 tokens and 2%"
    ) in told


def test_prompts_of_a_seed_are_the_same_bytes_and_no_two_begin_alike(tmp_path):
    with OpenAIServer().running() as server:
        for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
            args = ["--num-prompts", "6", "--input-len", "30", "--output-len", "1", "--seed", seed, "-o", name]
            printed("load", server.url, *args, cwd=tmp_path)
    sets = {name: (tmp_path / name / "requests.jsonl").read_bytes() for name in "abc"}
    assert sets["a"] == sets["b"] != sets["c"]
    prompts = [request.prompt.split() for request in load_results(tmp_path / "a").requests]
    assert len({first for first, *_ in prompts}) == 6
    assert {*map(len, prompts)} == {30}


def test_every_prompt_of_a_file_is_sent_once_with_the_length_of_its_row(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "How far is the moon?", "max_tokens": 3}\n{"prompt": "Why?", "output_len": 2}\n')
    with OpenAIServer().running() as server:
        args = ("load", server.url, "--prompts", "mine.jsonl", "--num-warmups", "0")
        printed(*args, "-o", "a", cwd=tmp_path)
        sent = {(each.body["prompt"], each.body["max_tokens"]) for each in server.requests}
        assert sent == {("How far is the moon?", 3), ("Why?", 2)}
        assert "custom has only 2 usable rows; set --num-prompts to at most 2\n" in refusal(
            *args, "--num-prompts", "3", cwd=tmp_path
        )
        assert "leave these out" in refusal(*args, "--dataset-name", "custom", cwd=tmp_path)
        file.write_text('{"prompt": "How far is the moon?"}\n')
        printed(*args, "-o", "b", cwd=tmp_path)
        assert server.requests[-1].body["max_tokens"] == 128


@pytest.mark.parametrize(
    ("args", "kind", "rate"),
    [
        ("", "burst", "inf"),
        ("--max-concurrency 2 --workers 2", "closed-loop", "inf"),
        ("--request-rate 200", "poisson", 200),
        ("--request-rate 200 --burstiness 4 --max-concurrency 2", "gamma", 200),
        ("--request-rate inf --max-concurrency 2", "closed-loop", "inf"),
    ],
)
def test_rate_and_concurrency_say_when_requests_are_sent(tmp_path, args, kind, rate):
    options = f"--num-prompts 4 --output-len 2 {args} -o out"
    with OpenAIServer().running() as server:
        printed("load", server.url, *options.split(), cwd=tmp_path)
    result = result_of(tmp_path / "out")
    arrival = parse_profile((tmp_path / "out" / "profile.yaml").read_text(), "profile.yaml").workload.arrival
    assert (arrival.kind, result["request_rate"], result["completed"]) == (kind, rate, 4)


def test_a_plain_server_gets_published_fields_its_own_model_and_the_key_that_no_file_has(tmp_path):
    with OpenAIServer().running() as server:
        options = "--num-prompts 2 --output-len 3 --num-warmups 2 --no-ignore-eos --api-key-env THEIR_KEY -o out"
        result = document("load", server.url, *options.split(), cwd=tmp_path, THEIR_KEY=KEY)
        assert "top_k" in refusal("load", server.url, "--dialect", "openai", "--top-k", "5", cwd=tmp_path)
    assert (result["total_output_tokens"], result["model_id"]) == (6, "theirs"), "warm-ups are in no number"
    published = {"model", "n", "seed", "temperature", "top_p", "stream", "stream_options", "max_tokens", "messages"}
    assert [set(sent.body) for sent in server.requests] == [published] * 4
    assert {sent.body["model"] for sent in server.requests} == {"theirs"}
    assert {sent.headers["authorization"] for sent in server.requests} == {f"Bearer {KEY}"}
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_failed_requests_stay_in_the_counts_and_goodput_and_make_a_load_suspect_or_failed(tmp_path):
    args = ["--num-prompts", "4", "--max-concurrency", "1", "--output-len", "2", "--num-warmups", "0"]
    with OpenAIServer(refuse=lambda sent: (500, "out of order") if sent.number == 3 else None).running() as server:
        output = printed("load", server.url, *args, "--goodput", "e2el:60000", "-o", "out", cwd=tmp_path, code=4)
    assert "3 completed, 1 failed (1 http-status)" in output
    result = result_of(tmp_path / "out")
    assert (result["num_prompts"], result["failed"], result["state"]) == (4, 1, "suspect")
    assert result["goodput"] == {"limits_ms": {"e2el": 60000.0}, "num_good": 3, "share": 0.75}
    assert result["request_goodput"] == pytest.approx(3 / result["duration"])
    with OpenAIServer(refuse=lambda _: (500, "out of order")).running() as server:
        assert "no-request-completed" in refusal("load", server.url, *args, cwd=tmp_path, code=5)


def test_where_nobody_answers_the_load_is_not_even_sent(tmp_path):
    told = refusal("load", "http://127.0.0.1:9", "--num-prompts", "1000", "-o", "out", cwd=tmp_path, code=5)
    assert "no load was sent" in told
    (run,) = load_results(tmp_path / "out").runs
    assert run.record.state == "failed"
    assert all(request.is_warmup for request in run.requests)


def test_a_command_line_of_vllm_bench_serve_is_understood(tmp_path):
    with sim_server(tmp_path / "server") as server:
        args = (
            f"--backend vllm --base-url {server.client.base_url} --endpoint /v1/completions --dataset-name random "
            "--random-input-len 40 --random-output-len=6 --num-prompts 8 --request-rate inf --max-concurrency 4 "
            "--ignore-eos --seed 3 --save-result --result-dir saved --result-filename run.json --disable-tqdm "
            "--percentile-metrics ttft,tpot --metric-percentiles 50,99 --goodput ttft:60000 e2el:0.001 "
            "--temperature 0 --label first --header User-Agent=mine --extra-body {}"
        )
        output = printed("load", *args.split(), cwd=tmp_path)
    assert "goodput        0 of 8 requests (0.0%): TTFT <= 60000 ms and end to end <= 0.001 ms" in output
    path, saved = only_result(tmp_path), json.loads((tmp_path / "saved" / "run.json").read_text())
    assert saved == result_of(path)
    assert (saved["completed"], saved["total_output_tokens"], saved["label"]) == (8, 48, "first")
    assert (saved["request_goodput"], saved["goodput"]["num_good"]) == (0.0, 0)
    profile = parse_profile((path / "profile.yaml").read_text(), "profile.yaml")
    assert (profile.sampling.temperature, profile.request.headers) == (0, {"User-Agent": "mine"})
    assert profile.engine.options["dialect"] == "vllm"


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("http://a:1 --num-prompts 3", "http://a:1 --num-prompts 3"),
        ("--base-url http://a:1 --num-prompts 3", "http://a:1 --num-prompts 3"),
        ("--host h --port 9", "http://h:9"),
        ("--port=9 --random-input-len=5", "http://127.0.0.1:9 --input-len 5"),
        ("u --dataset-name random", "u --dataset-name synthetic --input-len 1024"),
        ("u --random-input-len 7 --dataset-name random", "u --input-len 7 --dataset-name synthetic"),
        ("u --dataset-name sharegpt --sharegpt-output-len 9", "u --dataset-name sharegpt --output-len 9"),
        ("u --backend openai-chat --endpoint /v1/chat/completions", "u --dialect openai --chat --chat"),
        ("u --goodput ttft:200 tpot:50 --seed 1", "u --goodput ttft:200 --goodput tpot:50 --seed 1"),
        ("--goodput ttft:200 localhost:8000", "--goodput ttft:200 localhost:8000"),
        ("u --header A=1 B=2", "u --header A=1 --header B=2"),
        ("u --save-result --result-dir d", "u --result-file d/benchctl-load.json"),
        ("u --random-range-ratio 0.0 --metric-percentiles 99", "u"),
    ],
)
def test_a_line_of_vllm_bench_serve_is_a_line_of_ours(line, ours):
    assert translated(line.split()) == ours.split()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--backend tgi", "--backend is 'tgi'; choose one of openai, "),
        ("--endpoint /generate", "requests go to /v1/completions or /v1/chat/completions"),
        ("--random-range-ratio 0.5", "lengths of one load are equal"),
        ("--metric-percentiles 99.9", "result.json has 50, 90, 95, 99 and no others"),
        ("--append-result", "each load has a directory of its own"),
        ("--lora-modules a", "name the adapter in --model"),
        ("--goodput", "--goodput needs a value"),
    ],
)
def test_what_would_mean_something_else_is_refused_with_the_remedy(line, problem):
    with pytest.raises(UsageError, match=problem.replace(".", r"\.")):
        translated(line.split())


def test_an_interrupt_keeps_what_came(tmp_path):
    records = tmp_path / "out" / RUN / "requests.jsonl"
    with OpenAIServer(pace_s=0.02).running() as server:
        args = ["load", server.url, "--max-concurrency", "2", "--output-len", "20", "-o", "out"]
        with started(*args, cwd=tmp_path) as process:
            wait_until("three records", lambda: records.exists() and records.read_bytes().count(b"\n") > 2, 120)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "interrupted; results until now are kept. Show them with: benchctl show out" in stderr
    (run,) = load_results(tmp_path / "out").runs
    assert (run.record.failure.cause, len(run.requests) > 2) == ("interrupted", True)


def test_a_load_of_a_plain_server_imports_no_numpy_before_its_end_and_no_engine_that_it_does_not_speak_to(tmp_path):
    code = (
        "import sys\nfrom benchctl.cli.app import app\n"
        "from benchctl.measure import sending\nread = sending.load_run\n"
        "def read_back(directory):\n    print('imported', *sys.modules, file=sys.stderr)\n"
        "    return read(directory)\n"
        "sending.load_run = read_back\napp(prog_name='benchctl')\n"
    )
    with OpenAIServer().running() as server:
        argv = [sys.executable, "-c", code, "load", server.url, "--num-prompts", "1", "--output-len", "1"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("imported ")]
    assert "benchctl.measure.sending" in line.split()
    unneeded = {"numpy", "scipy", "vl_convert", "uvicorn", "pynvml", "tqdm", "benchctl.engines.vllm"}
    assert not unneeded & set(line.split())


def codes_of(tmp_path, server, *options, code):
    """The codes of the warnings on answers of a load, which ends with ``code``."""
    size = ["--num-prompts", "12", "--input-len", "20", "--output-len", "64", "--num-warmups", "0"]
    with server.running():
        args = [*size, "--max-concurrency", "4", *options, "-o", "out"]
        done = benchctl("load", server.url, *args, cwd=tmp_path, timeout_s=60)
    (run,) = load_results(tmp_path / "out").runs
    assert all(request.completion_tokens == 64 for request in run.requests), done.stderr
    codes = {warning.code for warning in run.record.warnings}
    # A client that a busy machine held up makes a load suspect as well, which says nothing of the answers.
    is_late_alone = codes & SUSPECT_CODES and codes & SUSPECT_CODES <= CLIENT_SUSPECT_CODES
    assert done.returncode == (0 if is_late_alone and not code else code), done.stderr
    of_answers = {"output-ended-early", "output-tokens-unseen", "check-failed", "failed-requests"}
    return codes & {*of_answers, "finish-reason-unknown"}


@pytest.mark.parametrize(
    ("dialect", "counted_by"),
    [
        ("openai", "last usage"),
        pytest.param("openai", "running usage", marks=pytest.mark.nightly),
        ("vllm", "ids"),
        ("sglang", "running usage"),
        pytest.param("sglang", "last usage", marks=pytest.mark.nightly),
        ("llamacpp", "timings"),
        ("transformers", "last usage"),
    ],
)
def test_answers_that_end_early_make_the_load_suspect_in_every_dialect(tmp_path, dialect, counted_by):
    finish, api = ("stop", "--chat") if counted_by in {"last usage", "ids"} else ("length", "--no-chat")
    server = OpenAIServer(share=0.5, finish=finish, counted_by=counted_by)
    codes = codes_of(tmp_path, server, "--dialect", dialect, api, code=4)
    assert codes & {"output-ended-early", "check-failed"}


@pytest.mark.parametrize(
    ("server", "code", "expected"),
    [
        (OpenAIServer(), 0, set()),
        (OpenAIServer(counted_by="timings", tokens_per_chunk=4), 0, set()),
        (OpenAIServer(counted_by="ids", tokens_per_chunk=8), 0, set()),
        (OpenAIServer(share=0.5, is_honest=True, pace_s=0.002), 0, set()),
        (OpenAIServer(share=0.5, is_honest=True, pace_s=0.002, counted_by="timings"), 0, set()),
        (OpenAIServer(tokens_per_chunk=4), 0, {"output-tokens-unseen"}),
        (OpenAIServer(finish="sudden\x1b[2Jdeath"), 4, {"finish-reason-unknown"}),
    ],
    ids=[
        "plain",
        "timings",
        "ids",
        "repeated end",
        "timings of a repeated end",
        "uncounted drafts",
        "unknown finish",
    ],
)
def test_honest_answers_are_done_and_what_nobody_can_count_or_know_is_told(tmp_path, server, code, expected):
    assert codes_of(tmp_path, server, "--dialect", "openai", code=code) == expected
    assert ("sudden\\\\x1b[2Jdeath" in (tmp_path / "out" / RUN / "run.json").read_text()) == (code == 4)
