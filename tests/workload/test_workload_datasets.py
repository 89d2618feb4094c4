"""Dataset files: fetched, pinned and read, with exact lengths, kept arrivals and shared beginnings."""

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.datasets import DATA, first, needs_data, source
from support.servers.handler_server import handled_by
from support.tokenizer_kinds import byte_level
from typer.testing import CliRunner

from benchctl.cli.commands.workloads import data
from benchctl.errors import DatasetError
from benchctl.workload.datasets.base import (
    DatasetFile,
    Selection,
    dataset_file,
    dataset_files,
    file_state,
    find_source,
    sha256_of,
)
from benchctl.workload.datasets.published import (
    DATASETS,
    fetch_dataset,
    gold_answer,
    gsm8k_prompts,
    sharegpt_prompts,
    timestamp_ns,
)
from benchctl.workload.seeded import numbers_of_prompt
from benchctl.workload.tokenizers import Estimate
from benchctl.workload.written_texts import counted_prompts

GSM8K_FILE = dataset_file("gsm8k")
replay_prompts = DATASETS["sharegpt-replay"].read
azure_prompts = DATASETS["azure-trace"].read


def sample(num_prompts, seed=0):
    return Selection(num_prompts=num_prompts, method="sample", seed=seed)


def write_gsm8k(path, num_rows=5):
    rows = [{"question": f"What is {i} + {i}?", "answer": f"Add.\n#### {2 * i}"} for i in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_gsm8k_gives_the_first_questions_in_file_order_as_a_chat_with_gold_answer(tmp_path):
    prompts = gsm8k_prompts(source(write_gsm8k(tmp_path / "test.jsonl"), "gsm8k"), first(2), Estimate())
    ids = [(prompt.prompt_id, prompt.source, prompt.answer) for prompt in prompts]
    assert ids == [("gsm8k-00000", "gsm8k:0", "0"), ("gsm8k-00001", "gsm8k:1", "2")]
    system, user = prompts[1].messages
    assert (system.role, user.role) == ("system", "user")
    assert system.content.startswith("You are Qwen, created by Alibaba Cloud.")
    assert re.fullmatch(r".*step by step.*\\boxed{}.*\n\nWhat is 1 \+ 1\?", user.content)


def test_gold_answer_is_what_follows_the_mark_without_grouping_commas():
    answers = {
        "so\n#### 70,000": "70000",
        "#### -3 ": "-3",
        "a #### 1\n#### 2.5": "2.5",
        "none": None,
        "####": None,
    }
    assert {solution: gold_answer(solution) for solution in answers} == answers


def test_fewer_rows_than_asked_are_refused_with_the_number_there_is(tmp_path):
    file = source(write_gsm8k(tmp_path / "test.jsonl"), "gsm8k")
    message = r"6 prompts are asked for, but gsm8k has only 5 .*num_prompts to at most 5"
    with pytest.raises(DatasetError, match=message):
        gsm8k_prompts(file, first(6), Estimate())


def test_a_sample_is_seeded_and_grows_without_changing_what_it_had(tmp_path):
    file = source(write_gsm8k(tmp_path / "test.jsonl", 50), "gsm8k")
    selections = (sample(5), sample(20), sample(5, seed=1), first(5))
    small, large, other, begun = (gsm8k_prompts(file, chosen, Estimate()) for chosen in selections)
    assert large[:5] == small
    assert other != small != begun
    assert len({prompt.prompt_id for prompt in large}) == 20


@needs_data
def test_the_real_files_are_the_pinned_ones_with_prompts_as_long_as_published():
    names = {"gsm8k": gsm8k_prompts, "sharegpt-replay": replay_prompts, "azure-trace": azure_prompts}
    files = {name: find_source(dataset_file(name), None, DATA) for name in names}
    gsm8k, replay, azure = (read(files[name], first(300), Estimate()) for name, read in names.items())
    # 102 to 106 tokens a prompt over the first 50 questions is what was measured with Qwen's tokenizer.
    counts = Estimate().count_chats([prompt.messages for prompt in gsm8k[:50]])
    assert sum(counts) / 50 == pytest.approx(104, abs=2)
    counted = list(counted_prompts(replay, Estimate(), chat=False))
    assert [prompt.num_tokens for prompt in counted] == [len(prompt.token_numbers) for prompt in replay]
    assert sum(prompt.num_tokens for prompt in counted) == 257_239
    assert max(prompt.arrival_ns for prompt in azure) < 3600 * 10**9  # an hour


LONG = "word " * 1025
ASKED, ANSWERED = "Tell me a story please", "Once upon a time there was"


def conversation(*turns):
    return {"id": "x", "conversations": [{"from": speaker, "value": value} for speaker, value in turns]}


@pytest.fixture
def shared(tmp_path):
    """Writes conversations as ShareGPT does, and reads the first prompts of them."""

    def read(*rows, num_prompts=1, counts=None):
        path = tmp_path / "s.json"
        path.write_text(json.dumps(rows))
        return sharegpt_prompts(source(path, "sharegpt"), first(num_prompts), counts or Estimate())

    return read


@pytest.mark.parametrize(
    "bad",
    [
        conversation(("human", "Only one turn of text here")),
        conversation(("gpt", ASKED), ("human", ANSWERED)),
        conversation(("system", ASKED), ("gpt", ANSWERED)),
        conversation(("human", "Too short prompt"), ("gpt", ANSWERED)),
        conversation(("human", ASKED), ("gpt", "No I won")),
        conversation(("human", LONG), ("gpt", ANSWERED)),
        conversation(("human", ASKED), ("gpt", LONG * 2)),
        {"id": "empty"},
    ],
    ids=["one turn", "gpt", "system", "short prompt", "short answer", "long prompt", "long answer", "empty"],
)
def test_sharegpt_leaves_out_conversations_beyond_the_limits(shared, bad):
    good = conversation(("human", ASKED), ("gpt", ANSWERED), ("human", "More"))
    (prompt,) = shared(bad, good)
    assert (prompt.prompt_id, prompt.source, prompt.text) == ("sharegpt-00001", "sharegpt:1", ASKED)
    assert (prompt.num_tokens, prompt.output_tokens) == (5, 6)
    with pytest.raises(DatasetError, match="only 1 usable rows"):
        shared(bad, good, num_prompts=2)


def test_sharegpt_keeps_conversations_at_the_limits_of_the_tokenizer_that_it_is_given(shared):
    longest = " ".join(["word"] * 1024)
    (prompt,) = shared(conversation(("human", longest), ("gpt", longest)))
    assert (prompt.num_tokens, prompt.output_tokens) == (1024, 1024)
    tokenizer = byte_level(259)
    (prompt,) = shared(conversation(("human", "今天天气怎么样"), ("gpt", "晴天很适合散步")), counts=tokenizer)
    assert (prompt.num_tokens, prompt.output_tokens, tokenizer.calls) == (21, 21, [2])
    long = conversation(("human", "天" * 400), ("gpt", "晴天很适合散步"))
    assert shared(long)
    with pytest.raises(DatasetError, match="only 0 usable rows; correct its rows, or name another file"):
        shared(long, counts=tokenizer)  # 1,200 bytes, above the limit of 1,024


def test_replay_keeps_token_ids_lengths_and_arrivals(tmp_path):
    ids = [5971, 2927, 220, 128_000]
    path = tmp_path / "r.jsonl"
    given = ({"input_toks": 4, "input_tok_ids": ids}, {"input_toks": 9})
    rows = [{"output_toks": 7, "arrival_time_ns": 5 + i, **row} for i, row in enumerate(given)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, no_ids = replay_prompts(source(path, "sharegpt-replay"), first(2), Estimate())
    assert one.token_numbers == tuple(ids)
    assert no_ids.token_numbers == numbers_of_prompt(9, 1, seed=0)
    assert (no_ids.output_tokens, no_ids.arrival_ns) == (7, 6)


def test_azure_gives_lengths_and_arrivals_from_the_first_row_with_seven_decimals(tmp_path):
    path = tmp_path / "a.csv"
    rows = ("2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109")
    path.write_text("\r\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)), newline="")
    one, two = azure_prompts(source(path, "azure-trace"), first(2), Estimate())
    assert (one.arrival_ns, two.arrival_ns) == (0, 4_314_579_000)
    assert (len(two.token_numbers), two.output_tokens, two.prompt_id) == (396, 109, "azure-trace-00001")
    assert timestamp_ns("1970-01-01 00:00:01.0000001") == 1_000_000_100
    assert timestamp_ns("1970-01-02 00:00:00") == 86_400 * 10**9


def test_a_file_that_is_not_the_pinned_one_is_refused_with_both_hashes_and_an_explicit_one_taken(tmp_path):
    assert find_source(GSM8K_FILE, None, tmp_path) is None
    assert file_state(GSM8K_FILE, tmp_path, full=True) == "missing"
    (tmp_path / "gsm8k").mkdir()
    path = write_gsm8k(tmp_path / "gsm8k/test.jsonl")
    with pytest.raises(DatasetError) as raised:
        find_source(GSM8K_FILE, None, tmp_path)
    for word in (sha256_of(path), GSM8K_FILE.sha256, "benchctl data fetch gsm8k", "workload.path"):
        assert word in str(raised.value)
    assert {file_state(GSM8K_FILE, tmp_path, full=full) for full in (True, False)} == {"damaged"}
    named = find_source(GSM8K_FILE, str(path), tmp_path / "elsewhere")
    assert named.dataset == f"gsm8k/sha256-{sha256_of(path)[:16]}"  # any content, called after its hash


# pooch leaves sockets of redirects and failed requests to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def site():
    """What a server delivers, where it cuts the body, and how often it was asked."""
    site = SimpleNamespace(content=CONTENT, cut_after=None, declares_length=True, status=None, num_requests=0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            site.num_requests += 1
            body = b"" if site.status else site.content
            self.send_response(302 if self.path == "/moved" else site.status or 200)
            if self.path == "/moved":
                body = b""
                self.send_header("Location", "/file")
            if site.declares_length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: site.cut_after])
            self.close_connection = True

        log_message = Mock()

    with handled_by(Handler) as url:
        site.url = f"{url}/file"
        yield site


def file_of(site):
    return DatasetFile(
        name="gsm8k",
        label="gsm8k/test",
        folder="gsm8k",
        filename="test.jsonl",
        url=site.url,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size_bytes=len(CONTENT),
        licence="MIT",
        source_page="https://example.org",
    )


def fetched_from(site, directory, bar=None):
    return fetch_dataset(file_of(site), directory, bar or Mock())


def test_a_file_is_fetched_with_progress_and_again_only_when_it_is_damaged(site, tmp_path):
    bar = Mock()
    path = fetched_from(site, tmp_path, bar)
    assert path.read_bytes() == CONTENT
    assert list(tmp_path.rglob("*.*")) == [path] == [tmp_path / "gsm8k/test.jsonl"]
    # pooch resets the bar at the end of a file, and fills it once more.
    received = sum(call.args[0] for call in bar.update.call_args_list)
    assert (bar.total, received) == (len(CONTENT), 2 * len(CONTENT))
    fetched_from(site, tmp_path)
    assert site.num_requests == 1
    path.write_bytes(b"damaged")
    site.url = site.url.replace("/file", "/moved")  # which leads to the file
    assert fetched_from(site, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("declares_length", [True, False])
def test_a_cut_connection_leaves_nothing_and_the_next_fetch_succeeds(site, tmp_path, declares_length):
    site.cut_after, site.declares_length = 300_000, declares_length
    with pytest.raises(DatasetError, match=r"could not be fetched .*Run 'benchctl data fetch gsm8k' again"):
        fetched_from(site, tmp_path)
    assert list((tmp_path / "gsm8k").iterdir()) == []
    site.cut_after = None
    assert fetched_from(site, tmp_path).read_bytes() == CONTENT


def test_wrong_content_is_refused_with_both_hashes_and_nothing_is_kept(site, tmp_path):
    for content in (CONTENT[::-1], CONTENT + b"more", b""):
        site.content = content
        with pytest.raises(DatasetError, match=file_of(site).sha256) as raised:
            fetched_from(site, tmp_path)
        assert hashlib.sha256(content).hexdigest() in str(raised.value)
        assert list((tmp_path / "gsm8k").iterdir()) == []


def test_a_refusing_server_no_server_and_a_full_place_are_named_with_the_remedy(site, tmp_path):
    site.status = 403
    with pytest.raises(DatasetError, match=rf"^.*from {site.url}: .*403.*copy the file.* to {tmp_path}.*$"):
        fetched_from(site, tmp_path)
    site.url = "http://127.0.0.1:1/file"
    with pytest.raises(DatasetError, match="could not be fetched"):
        fetched_from(site, tmp_path)
    (tmp_path / "gsm8k").rmdir()
    (tmp_path / "gsm8k").write_text("a file where a folder is needed")
    with pytest.raises(DatasetError, match=r"cannot be written: .*BENCHCTL_DATA_DIR"):
        fetched_from(site, tmp_path)


@pytest.fixture
def command(site, tmp_path, monkeypatch):
    """Runs ``benchctl data`` on a data directory of its own."""
    monkeypatch.setenv("BENCHCTL_DATA_DIR", str(tmp_path))
    monkeypatch.setitem(dataset_files(), "gsm8k", file_of(site))
    return lambda *words: CliRunner().invoke(data, words)


def test_list_shows_state_size_licence_and_path(command, tmp_path):
    (tmp_path / "azure").mkdir()
    (tmp_path / "azure/AzureLLMInferenceTrace_conv.csv").write_text("cut off")
    output = command("list").output
    for row in (r"gsm8k .*missing.*gsm8k/test\.jsonl", r"sharegpt .*missing.*672\.8 MB", r"azure-trace .*damaged"):
        assert re.search(rf"(?m)^ *{row}", output), row
    assert f"data directory: {tmp_path}" in output


def test_fetch_puts_the_file_in_the_data_directory_and_verify_tells_what_is_missing_or_damaged(command, tmp_path):
    assert command("verify").exit_code == 0  # of everything: what is missing does not matter
    assert "is missing" in str(command("verify", "gsm8k").exception)
    fetched = command("fetch", "gsm8k")
    assert fetched.output == f"gsm8k: {tmp_path}/gsm8k/test.jsonl (1.0 MB, MIT, sha256 checked)\n"
    assert "present" in command("verify", "gsm8k").output
    (tmp_path / "gsm8k/test.jsonl").write_bytes(CONTENT[::-1])
    assert "present" in command("list").output  # by its size
    assert "is damaged; run 'benchctl data fetch gsm8k'" in str(command("verify").exception)
    for word in ("fetch", "verify"):
        assert f"choose one of {', '.join(dataset_files())}" in str(command(word, "gsm9k").exception)
