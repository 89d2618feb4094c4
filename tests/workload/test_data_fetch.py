"""Fetching dataset files from a real local server: whole, cut, wrong, refused."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

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
runner = CliRunner()


@dataclass
class Site:
    """What the server delivers, and what it was asked."""

    content: bytes = CONTENT
    cut_after: int | None = None
    """Close the connection after this many bytes of a body."""
    declares_length: bool = True
    status: int | None = None
    num_requests: int = 0
    url: str = ""

    def file(self) -> DatasetFile:
        return DatasetFile(
            name="gsm8k",
            label="gsm8k/test",
            folder="gsm8k",
            filename="test.jsonl",
            url=self.url,
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            size_bytes=len(CONTENT),
            licence="MIT",
            source_page="https://example.org",
        )


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.num_requests += 1
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/file")
                self.end_headers()
                return
            body = b"" if site.status else site.content
            self.send_response(site.status or 200)
            if site.declares_length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: site.cut_after])
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    with handled_by(Handler) as url:
        site.url = f"{url}/file"
        yield site


class Bar:
    """A progress bar that remembers."""

    def __init__(self) -> None:
        self.total = 0
        self.num_bytes = 0

    def update(self, num_bytes: int, /) -> None:
        self.num_bytes += num_bytes

    def reset(self) -> None:
        self.num_bytes = 0

    def close(self) -> None:
        pass


def fetch(site: Site, directory: Path) -> Path:
    return fetch_dataset(site.file(), directory, Bar())


def test_a_file_is_fetched_checked_and_put_in_place_with_progress(site: Site, tmp_path: Path) -> None:
    bar = Bar()
    path = fetch_dataset(site.file(), tmp_path, bar)
    assert path == tmp_path / "gsm8k/test.jsonl"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["test.jsonl"]
    assert (bar.total, bar.num_bytes) == (len(CONTENT), len(CONTENT))


def test_a_file_that_is_here_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    fetch(site, tmp_path)
    fetch(site, tmp_path)
    assert site.num_requests == 1


def test_a_damaged_file_is_replaced(site: Site, tmp_path: Path) -> None:
    fetch(site, tmp_path).write_bytes(b"damaged")
    assert fetch(site, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("declares_length", [True, False])
def test_a_cut_connection_leaves_nothing_and_the_next_fetch_succeeds(
    site: Site, tmp_path: Path, declares_length: bool
) -> None:
    site.cut_after, site.declares_length = 300_000, declares_length
    with pytest.raises(DatasetError, match=r"could not be fetched .*Run 'benchctl data fetch gsm8k' again"):
        fetch(site, tmp_path)
    assert list((tmp_path / "gsm8k").iterdir()) == []
    site.cut_after = None
    assert fetch(site, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[::-1], CONTENT + b"more", b""])
def test_wrong_content_is_refused_with_both_hashes_and_nothing_is_kept(
    site: Site, tmp_path: Path, content: bytes
) -> None:
    site.content = content
    with pytest.raises(DatasetError) as raised:
        fetch(site, tmp_path)
    assert hashlib.sha256(content).hexdigest() in str(raised.value)
    assert site.file().sha256 in str(raised.value)
    assert list((tmp_path / "gsm8k").iterdir()) == []


def test_a_refusing_server_is_named_with_the_way_without_network(site: Site, tmp_path: Path) -> None:
    site.status = 403
    with pytest.raises(DatasetError, match=rf"from {site.url}: .*403.*copy the file.* to {tmp_path}") as raised:
        fetch(site, tmp_path)
    assert "\n" not in str(raised.value)


def test_no_server_is_an_error_of_usage(site: Site, tmp_path: Path) -> None:
    site.url = "http://127.0.0.1:1/file"
    with pytest.raises(DatasetError, match="could not be fetched") as raised:
        fetch(site, tmp_path)
    assert raised.value.exit_code == 2


def test_redirects_are_followed(site: Site, tmp_path: Path) -> None:
    site.url = site.url.replace("/file", "/moved")
    assert fetch(site, tmp_path).read_bytes() == CONTENT
    assert site.num_requests == 2


def test_a_directory_that_cannot_be_written_is_named(site: Site, tmp_path: Path) -> None:
    (tmp_path / "gsm8k").write_text("a file where a folder is needed")
    with pytest.raises(DatasetError, match=r"cannot be written: .*BENCHCTL_DATA_DIR"):
        fetch(site, tmp_path)


# The command


@pytest.fixture
def data_home(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BENCHCTL_DATA_DIR", str(tmp_path))
    monkeypatch.setitem(dataset_files(), "gsm8k", site.file())
    return tmp_path


def test_list_shows_state_size_licence_and_place(data_home: Path) -> None:
    (data_home / "azure").mkdir()
    (data_home / "azure/AzureLLMInferenceTrace_conv.csv").write_text("cut off")
    done = runner.invoke(data, ["list"])
    assert done.exit_code == 0
    rows = {line.split()[0]: line for line in done.output.splitlines()}
    assert "missing" in rows["gsm8k"]
    assert "missing" in rows["sharegpt"]
    assert "672.8 MB" in rows["sharegpt"]
    assert "damaged" in rows["azure-trace"]
    assert "CC-BY-4.0" in rows["azure-trace"]
    assert "gsm8k/test.jsonl" in rows["gsm8k"]
    assert f"data directory: {data_home}" in done.output


def test_fetch_puts_the_file_in_the_data_directory_and_verify_agrees(data_home: Path) -> None:
    fetched = runner.invoke(data, ["fetch", "gsm8k"])
    assert fetched.exit_code == 0
    assert fetched.output == f"gsm8k: {data_home}/gsm8k/test.jsonl (1.0 MB, MIT, sha256 checked)\n"
    verified = runner.invoke(data, ["verify", "gsm8k"])
    assert verified.exit_code == 0
    assert "present" in verified.output


def test_verify_reports_a_file_of_the_right_size_with_wrong_content(data_home: Path) -> None:
    (data_home / "gsm8k").mkdir()
    (data_home / "gsm8k/test.jsonl").write_bytes(CONTENT[::-1])
    assert "present" in runner.invoke(data, ["list"]).output
    done = runner.invoke(data, ["verify"])
    assert "damaged" in done.output
    assert isinstance(done.exception, DatasetError)
    assert "is damaged; run 'benchctl data fetch gsm8k'" in str(done.exception)


def test_verify_of_everything_does_not_mind_what_is_missing_but_of_one_does(data_home: Path) -> None:
    assert runner.invoke(data, ["verify"]).exit_code == 0
    done = runner.invoke(data, ["verify", "gsm8k"])
    assert isinstance(done.exception, DatasetError)
    assert "is missing" in str(done.exception)


@pytest.mark.parametrize("command", ["fetch", "verify"])
def test_an_unknown_name_is_refused_with_the_known_ones(data_home: Path, command: str) -> None:
    done = runner.invoke(data, [command, "gsm9k"])
    assert isinstance(done.exception, DatasetError)
    assert f"choose one of {', '.join(dataset_files())}" in str(done.exception)
