"""Data sets of the Hugging Face Hub, from a hub on this machine: files, columns, and what is refused."""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support.prepared import prepare
from support.servers.handler_server import handled_by

from benchctl.errors import DatasetError, MissingPackageError, ProfileError

pytest.importorskip("huggingface_hub")
REVISION = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"question": "What is 1 + 1?", "answer": "2"}, {"question": "What is 2 + 2?", "answer": "4"}]


def jsonl(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@dataclass
class Hub:
    """Files of the one data set ``me/sums``, by name."""

    files: dict[str, bytes] = field(default_factory=dict)
    num_downloads: int = 0

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers."""
        if path.startswith(f"/api/datasets/me/sums/tree/{REVISION}"):
            tree = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in self.files]
            return 200, json.dumps(tree).encode(), {}
        name = path.removeprefix(f"/datasets/me/sums/resolve/{REVISION}/")
        if name not in self.files:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        etag = hashlib.sha256(self.files[name]).hexdigest()
        return 200, self.files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> bytes:
            status, body, headers = hub.answer(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.close_connection = True
            return body

        def do_GET(self) -> None:
            hub.num_downloads += "/resolve/" in self.path
            self.wfile.write(self.do_HEAD())

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    with handled_by(Handler) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        yield hub


def sums(**workload: Any) -> dict[str, Any]:
    return {
        "dataset": "huggingface",
        "path": "me/sums",
        "revision": REVISION,
        "num_prompts": 2,
        "columns": {"prompt": "question", "gold": "answer"},
    } | workload


def test_columns_of_a_split_are_prompts_and_the_files_digest_is_recorded(hub: Hub) -> None:
    hub.files = {"README.md": b"", "train.jsonl": jsonl({"question": "no"}), "test.jsonl": jsonl(*ROWS)}
    prepared = prepare(sums(split="test"))
    assert [request.prompt for request in prepared.requests] == [row["question"] for row in ROWS]
    assert [request.answer for request in prepared.requests] == ["2", "4"]
    digest = hashlib.sha256(hub.files["test.jsonl"]).hexdigest()
    assert prepared.dataset == f"me/sums@{REVISION[:12]}/sha256-{digest[:16]}"
    assert prepare(sums(split="test")).content == prepared.content
    assert hub.num_downloads == 1


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_other_formats_have_the_same_rows(hub: Hub, suffix: str) -> None:
    hub.files = {f"data/test-00000-of-00001.{suffix}": content_as(suffix)}
    assert [request.prompt for request in prepare(sums()).requests] == [row["question"] for row in ROWS]


def content_as(suffix: str) -> bytes:
    if suffix == "json":
        return json.dumps(ROWS).encode()
    if suffix == "csv":
        return ("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in ROWS)).encode()
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink)
    return sink.getvalue().to_pybytes()


def test_a_file_that_was_fetched_before_needs_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"main/test.jsonl": jsonl(*ROWS)}
    workload = sums(path="me/sums/main/test.jsonl")
    prepared = prepare(workload)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert prepare(workload).content == prepared.content


def test_all_parts_of_a_split_are_read_in_order(hub: Hub) -> None:
    hub.files = {f"main/test-0000{i}-of-00002.jsonl": jsonl(row) for i, row in enumerate(ROWS)}
    prepared = prepare(sums(path="me/sums/main", split="test"))
    assert [request.prompt for request in prepared.requests] == [row["question"] for row in ROWS]


@pytest.mark.parametrize(
    ("workload", "message"),
    [
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
    ],
)
def test_what_cannot_be_read_is_refused_with_the_remedy(hub: Hub, workload: dict[str, Any], message: str) -> None:
    hub.files = {"README.md": b"", "main/test.jsonl": jsonl(*ROWS), "socratic/test.jsonl": jsonl(*ROWS)}
    with pytest.raises((ProfileError, DatasetError), match=message):
        prepare(sums() | workload)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_damaged_file_is_named(hub: Hub, suffix: str) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    hub.files = {f"test.{suffix}": b"[{]"}
    with pytest.raises(DatasetError, match=rf"test\.{suffix}.*the file of me/sums\S* is damaged"):
        prepare(sums())


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackageError, match=r"huggingface_hub is not.*pip install huggingface_hub"):
        prepare(sums())


def test_a_parquet_file_names_the_package_that_reads_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    hub.files = {"test.parquet": b"PAR1"}
    with pytest.raises(MissingPackageError, match=r"the package pyarrow is not.*pip install pyarrow"):
        prepare(sums())
