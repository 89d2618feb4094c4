"""Prompts of one's own, Mooncake's traces, and data sets of a hub on this machine: read with all that rows say."""

import hashlib
import io
import json
import sys
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.datasets import source
from support.prepared import prepare
from support.servers.handler_server import handled_by

from benchctl.errors import DatasetError, MissingPackageError, ProfileError
from benchctl.workload.datasets.published import mooncake_trace
from benchctl.workload.prepare import RecordedLoad
from benchctl.workload.seeded import TOKENS_PER_BLOCK

CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]


@pytest.fixture
def write_rows(tmp_path):
    """Writes rows to a file, and returns its path."""

    def write(*rows):
        path = tmp_path / "mine.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def prepared_of(path, *, stop="natural", **workload):
    return prepare({"dataset": "custom", "path": str(path), "num_prompts": 1} | workload, stop=stop)


def test_texts_and_chats_are_sent_as_they_are_with_gold_and_session(write_rows):
    path = write_rows(
        {"prompt": "What is 1 + 1?", "gold": 2, "session": "a", "note": "left unread"},
        {"messages": CHAT, "session": 7},
    )
    prepared = prepared_of(path, num_prompts=2)
    text, chat = prepared.requests
    name = f"custom/sha256-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    assert (text.prompt, text.answer, text.session, text.source) == ("What is 1 + 1?", "2", "a", f"{name}:0")
    assert [{"role": turn.role, "content": turn.content} for turn in chat.messages] == CHAT
    assert (chat.answer, chat.session, chat.request_id) == (None, "7", "custom-00001")


def test_timestamps_in_milliseconds_are_arrivals_from_the_first(write_rows):
    times = (1_700_000_002_500, 1_700_000_000_000.5)
    path = write_rows(*({"prompt": str(at), "timestamp": at, "output_len": 3} for at in times))
    requests = prepared_of(path, num_prompts=2, arrival={"kind": "trace"}, stop="forced").requests
    assert [(request.arrival_ns, request.max_tokens) for request in requests] == [(0, 3), (2_499_500_000, 3)]


def test_a_planned_prompt_shares_the_blocks_that_it_names(write_rows):
    path = write_rows(*({"input_len": 1000, "hash_ids": ids} for ids in ([1, 2], [1, 3], [1, 2])))
    requests = prepared_of(path, num_prompts=3).requests
    words = [request.prompt.split() for request in requests]
    assert [request.prompt_tokens for request in requests] == [1000] * 3
    assert words[0][:TOKENS_PER_BLOCK] == words[1][:TOKENS_PER_BLOCK]
    assert words[0][TOKENS_PER_BLOCK] != words[1][TOKENS_PER_BLOCK]
    assert words[0] == words[2]


def test_what_rows_lack_is_named_by_the_first_row_without(write_rows):
    path = write_rows({"prompt": "a", "output_len": 3, "timestamp": 0}, {"prompt": "b"})
    with pytest.raises(ProfileError, match=r"no output lengths of their own \(the first without: custom/\S+:1\)"):
        prepared_of(path, num_prompts=2, stop="forced")
    with pytest.raises(ProfileError, match=r"arrival\.kind is trace, but custom/\S+:1 has no recorded arrival"):
        prepared_of(path, num_prompts=2, arrival={"kind": "trace"})


def mooncake_row(timestamp, tokens, ids):
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 5, "hash_ids": ids}


def test_mooncake_keeps_lengths_arrivals_and_shared_blocks(write_rows):
    path = write_rows(
        mooncake_row(0, 1100, [0, 1, 2]), mooncake_row(3000, 600, [0, 9]), mooncake_row(3000, 1200, [0, 1, 2])
    )
    workload = {"dataset": "mooncake", "num_prompts": 3, "arrival": {"kind": "trace"}}
    requests = prepared_of(path, stop="forced", **workload).requests
    sizes = [(request.arrival_ns, request.prompt_tokens, request.max_tokens) for request in requests]
    assert sizes == [(0, 1100, 5), (3 * 10**9, 600, 5), (3 * 10**9, 1200, 5)]
    words = [request.prompt.split() for request in requests]
    assert words[0][:512] == words[1][:512]
    assert words[0][512:600] != words[1][512:600]
    assert words[2][:1100] == words[0]
    load = RecordedLoad.of(mooncake_trace(source(path, "mooncake")))
    assert (list(load.prompt_tokens), list(load.arrival_ns)) == ([1100, 600, 1200], [0, 3 * 10**9, 3 * 10**9])


pytest.importorskip("huggingface_hub")


REVISION = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"question": "What is 1 + 1?", "answer": "2"}, {"question": "What is 2 + 2?", "answer": "4"}]
QUESTIONS = [row["question"] for row in ROWS]


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the one data set ``me/sums``: its files by name, and how often one was sent."""
    hub = SimpleNamespace(files={}, num_downloads=0)

    def answer(path):
        """Status, body and headers."""
        if path.startswith(f"/api/datasets/me/sums/tree/{REVISION}"):
            tree = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in hub.files]
            return 200, json.dumps(tree).encode(), {}
        body = hub.files.get(path.removeprefix(f"/datasets/me/sums/resolve/{REVISION}/"))
        if body is None:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        return 200, body, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": REVISION}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            status, body, headers = answer(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.close_connection = True
            return body

        def do_GET(self):
            hub.num_downloads += "/resolve/" in self.path
            self.wfile.write(self.do_HEAD())

        log_message = Mock()

    with handled_by(Handler) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        # Both are read from the environment of whichever test used the package first.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield hub


def sums(**workload):
    columns = {"prompt": "question", "gold": "answer"}
    rows = {"dataset": "huggingface", "path": "me/sums", "revision": REVISION, "num_prompts": 2, "columns": columns}
    return prepare(rows | workload)


def test_columns_of_a_split_are_prompts_and_the_files_digest_is_recorded(hub, monkeypatch):
    hub.files = {"README.md": b"", "train.jsonl": jsonl({"question": "no"}), "test.jsonl": jsonl(*ROWS)}
    prepared = sums(split="test")
    assert [(request.prompt, request.answer) for request in prepared.requests] == [
        *zip(QUESTIONS, "24", strict=True)
    ]
    digest = hashlib.sha256(hub.files["test.jsonl"]).hexdigest()
    assert prepared.dataset == f"me/sums@{REVISION[:12]}/sha256-{digest[:16]}"
    assert sums(split="test").content == prepared.content
    assert sums(path="me/sums/test.jsonl").requests == prepared.requests
    assert hub.num_downloads == 1
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # a file that was fetched needs no hub
    assert sums(path="me/sums/test.jsonl").requests == prepared.requests


def test_other_formats_and_parts_of_a_split_have_the_same_rows_in_order(hub):
    parquet, table = pytest.importorskip("pyarrow.parquet"), io.BytesIO()
    parquet.write_table(sys.modules["pyarrow"].Table.from_pylist(ROWS), table)
    csv = b"question,answer\nWhat is 1 + 1?,2\nWhat is 2 + 2?,4\n"
    for suffix, content in (("json", json.dumps(ROWS).encode()), ("csv", csv), ("parquet", table.getvalue())):
        hub.files = {f"{suffix}/test-00000-of-00001.{suffix}": content}
        assert [request.prompt for request in sums(path=f"me/sums/{suffix}").requests] == QUESTIONS, suffix
    hub.files = {f"main/test-0000{i}-of-00002.jsonl": jsonl(row) for i, row in enumerate(ROWS)}
    assert [request.prompt for request in sums(path="me/sums/main", split="test").requests] == QUESTIONS


def test_what_cannot_be_read_is_refused_with_the_remedy(hub):
    hub.files = {"README.md": b"", "main/test.jsonl": jsonl(*ROWS), "socratic/test.jsonl": jsonl(*ROWS)}
    for workload, message in (
        ({"path": None}, r"workload\.path is missing with dataset huggingface; name a data set as owner/name"),
        ({"path": "sums"}, r"workload\.path is sums with dataset huggingface"),
        ({"revision": None}, r"workload\.revision is missing, .*name the commit, 40 hex digits"),
        ({"revision": "main"}, r"workload\.revision is main, but data sets change"),
        ({"split": "validation"}, r"no file of split validation .* was found; it has main/test\.jsonl"),
        ({"path": "me/sums/other"}, r"no data file .* was found; it has README\.md, main/test\.jsonl"),
        (
            {"split": "test"},
            r"several sets of rows: main/test\.jsonl, socratic/test\.jsonl; name the split, or one",
        ),
        ({"path": "me/no"}, r"data set me/no at revision 0123\S+ cannot be had .*correct workload\.path"),
        ({"columns": {"promt": "question"}, "path": "me/sums/main"}, r"maps promt; fields are prompt, messages"),
        ({"columns": {"prompt": "text"}, "path": "me/sums/main"}, r"column text, which is prompt, is not among"),
    ):
        with pytest.raises((ProfileError, DatasetError), match=message):
            sums(**workload)


@pytest.mark.parametrize("package", ["huggingface_hub", "pyarrow"])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(hub, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    hub.files = {"test.parquet": b"PAR1"}
    with pytest.raises(MissingPackageError, match=rf"{package} is not.*pip install {package}"):
        sums()
