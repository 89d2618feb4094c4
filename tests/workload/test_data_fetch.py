"""Fetching dataset files from a real local server: whole, cut, wrong, refused."""

import hashlib
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.servers.handler_server import handled_by
from typer.testing import CliRunner

from benchctl.cli.commands.workloads import data
from benchctl.errors import DatasetError
from benchctl.workload.datasets.base import DatasetFile, dataset_files
from benchctl.workload.datasets.published import fetch_dataset

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


def fetch(site, directory, bar=None):
    return fetch_dataset(file_of(site), directory, bar or Mock())


def test_a_file_is_fetched_with_progress_and_again_only_when_it_is_damaged(site, tmp_path):
    bar = Mock()
    path = fetch(site, tmp_path, bar)
    assert path.read_bytes() == CONTENT
    assert list(tmp_path.rglob("*.*")) == [path] == [tmp_path / "gsm8k/test.jsonl"]
    # pooch resets the bar at the end of a file, and fills it once more.
    received = sum(call.args[0] for call in bar.update.call_args_list)
    assert (bar.total, received) == (len(CONTENT), 2 * len(CONTENT))
    fetch(site, tmp_path)
    assert site.num_requests == 1
    path.write_bytes(b"damaged")
    site.url = site.url.replace("/file", "/moved")
    assert fetch(site, tmp_path).read_bytes() == CONTENT
    assert site.num_requests == 3  # the redirect as well


@pytest.mark.parametrize("declares_length", [True, False])
def test_a_cut_connection_leaves_nothing_and_the_next_fetch_succeeds(site, tmp_path, declares_length):
    site.cut_after, site.declares_length = 300_000, declares_length
    with pytest.raises(DatasetError, match=r"could not be fetched .*Run 'benchctl data fetch gsm8k' again"):
        fetch(site, tmp_path)
    assert list((tmp_path / "gsm8k").iterdir()) == []
    site.cut_after = None
    assert fetch(site, tmp_path).read_bytes() == CONTENT


def test_wrong_content_is_refused_with_both_hashes_and_nothing_is_kept(site, tmp_path):
    for content in (CONTENT[::-1], CONTENT + b"more", b""):
        site.content = content
        with pytest.raises(DatasetError, match=file_of(site).sha256) as raised:
            fetch(site, tmp_path)
        assert hashlib.sha256(content).hexdigest() in str(raised.value)
        assert list((tmp_path / "gsm8k").iterdir()) == []


def test_a_refusing_server_no_server_and_a_full_place_are_named_with_the_remedy(site, tmp_path):
    site.status = 403
    with pytest.raises(DatasetError, match=rf"^.*from {site.url}: .*403.*copy the file.* to {tmp_path}.*$"):
        fetch(site, tmp_path)
    site.url = "http://127.0.0.1:1/file"
    with pytest.raises(DatasetError, match="could not be fetched") as raised:
        fetch(site, tmp_path)
    assert raised.value.exit_code == 2
    (tmp_path / "gsm8k").rmdir()
    (tmp_path / "gsm8k").write_text("a file where a folder is needed")
    with pytest.raises(DatasetError, match=r"cannot be written: .*BENCHCTL_DATA_DIR"):
        fetch(site, tmp_path)


@pytest.fixture
def command(site, tmp_path, monkeypatch):
    """Runs ``benchctl data`` on a data directory of its own."""
    monkeypatch.setenv("BENCHCTL_DATA_DIR", str(tmp_path))
    monkeypatch.setitem(dataset_files(), "gsm8k", file_of(site))
    return lambda *words: CliRunner().invoke(data, words)


def test_list_shows_state_size_licence_and_path(command, tmp_path):
    (tmp_path / "azure").mkdir()
    (tmp_path / "azure/AzureLLMInferenceTrace_conv.csv").write_text("cut off")
    done = command("list")
    assert done.exit_code == 0
    rows = {line.split()[0]: line for line in done.output.splitlines()}
    for name, words in {
        "gsm8k": ("missing", "gsm8k/test.jsonl"),
        "sharegpt": ("missing", "672.8 MB"),
        "azure-trace": ("damaged", "CC-BY-4.0"),
    }.items():
        assert all(word in rows[name] for word in words), rows[name]
    assert f"data directory: {tmp_path}" in done.output


def test_fetch_puts_the_file_in_the_data_directory_and_verify_tells_what_is_missing_or_damaged(command, tmp_path):
    assert command("verify").exit_code == 0  # of everything: what is missing does not matter
    assert "is missing" in str(command("verify", "gsm8k").exception)
    fetched = command("fetch", "gsm8k")
    assert fetched.output == f"gsm8k: {tmp_path}/gsm8k/test.jsonl (1.0 MB, MIT, sha256 checked)\n"
    verified = command("verify", "gsm8k")
    assert (verified.exit_code, "present" in verified.output) == (0, True)
    (tmp_path / "gsm8k/test.jsonl").write_bytes(CONTENT[::-1])
    assert "present" in command("list").output  # by its size
    damaged = command("verify")
    assert "damaged" in damaged.output
    assert isinstance(damaged.exception, DatasetError)
    assert "is damaged; run 'benchctl data fetch gsm8k'" in str(damaged.exception)
    for word in ("fetch", "verify"):
        assert f"choose one of {', '.join(dataset_files())}" in str(command(word, "gsm9k").exception)
