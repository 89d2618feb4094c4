"""Files that users name and documents of servers are read within bounds, and refused by name where they are bad."""

import asyncio
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from threading import Event

import httpx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.hostile_files import HOSTILE, refusal_of, write_hostile
from support.servers.parts_server import Writer, serving, writing
from support.strangers import within_seconds

import benchctl
from benchctl.errors import RecordError, UsageError
from benchctl.interop.foreign_readers import AIPERF_FILE, AIPERF_RECORDS, is_foreign, read_foreign
from benchctl.interop.layer_profile import DENSE, EXPERTS, read_layer_tables
from benchctl.load.control import control_client
from benchctl.measure.sending import undescribed_fields
from benchctl.measure.telemetry.samplers import prometheus_samples
from benchctl.profile.sections import Timeouts
from benchctl.untrusted import LINE_BYTES, files as searching
from benchctl.untrusted.files import (
    OutsideError,
    UnreadableError,
    files_below,
    read_bytes,
    read_csv_records,
    read_file,
    read_json,
    read_lines,
    read_text,
    read_yaml,
    replace_file,
)
from benchctl.untrusted.http import fetch, fetch_json, recordable

SIGNS = st.text(alphabet='{}[]",:\\ud8019.eE+-&*!<> \n\t', max_size=80)
READERS = {
    "json": read_json,
    "yaml": read_yaml,
    "csv": lambda path: list(read_csv_records(path)),
    "text": read_text,
    "lines": lambda path: list(read_lines(path)),
}


def test_a_reader_returns_or_names_the_file_in_one_short_line(tmp_path: Path) -> None:
    for name in HOSTILE:
        path = write_hostile(tmp_path / "stranger", name)
        for kind, read in READERS.items():
            if (kind, name) == ("yaml", "nested lists that end"):
                continue  # refused long before their end, as those without one are
            refusal = refusal_of(partial(read, path))
            is_short = "\n" not in refusal and len(refusal) < 500
            assert not refusal or (refusal.startswith(str(path)) and is_short), (name, refusal)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | SIGNS.map(str.encode))
def test_no_content_makes_a_reader_fail_otherwise(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "stranger"
    path.write_bytes(content)
    for read in READERS.values():
        refusal = refusal_of(partial(read, path))
        assert not refusal or str(path) in refusal


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join(f'*a{n - 1}' for _ in range(10))}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("read", "content", "problem"),
    [
        (read_json, HOSTILE["nested lists"], "nested too deeply"),
        (read_json, HOSTILE["a whole number of 5,000 digits"], "a number has 5000 digits"),
        (read_json, HOSTILE["half a pair of surrogates"], "surrogates not allowed"),
        (read_json, HOSTILE["invalid UTF-8"], "not UTF-8 text"),
        (read_json, HOSTILE["UTF-16"], "not UTF-8 text"),
        (read_json, HOSTILE["cut short"], "Unterminated string"),
        (read_yaml, BOMB.encode(), "it has 12,345,679,021 values"),
        (read_yaml, b"&a [1, *a]", "an alias stands inside of what it repeats"),
        (read_yaml, b"a: !!int ''", "IndexError|index"),
        (read_yaml, b"a: !!timestamp text", "AttributeError|attribute"),
        (read_yaml, b"a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        (read_yaml, b"a:\tb\n\tc: d", "cannot start any token"),
        (read_yaml, b"a: \0", "special characters are not allowed"),
        (READERS["csv"], b"a,b\n1,2\n1,2,3\n", r":3: 3 values under 2 names"),
    ],
)
def test_a_file_is_refused_for_its_own_reason(tmp_path: Path, read, content: bytes, problem: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UnreadableError, match=problem) as refusal:
        read(tmp_path / "a")
    assert str(tmp_path / "a") in str(refusal.value)


def test_what_is_unusual_and_sound_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text('{"request_rate": Infinity, "face": "\\ud83d\\ude00"}')
    assert read_json(path) == {"request_rate": float("inf"), "face": "\N{GRINNING FACE}"}
    path.write_text("stage: &stage {rate: 1}\nstages: [*stage, *stage]")
    assert read_yaml(path)[0] == {"stage": {"rate": 1}, "stages": [{"rate": 1}, {"rate": 1}]}
    path.write_bytes(b"\xef\xbb\xbfa,b\r\n\r\n1,2\r\n3\r\n")
    assert list(read_csv_records(path)) == [(3, {"a": "1", "b": "2"}), (4, {"a": "3", "b": ""})]


def test_reading_stops_at_the_bound_and_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    assert len(read_bytes(tmp_path / "a", 3_000_000)) == 3_000_000
    for path in (tmp_path / "a", Path("/dev/zero")):
        with pytest.raises(UnreadableError, match="larger than 1 MiB"):
            read_bytes(path, 1 << 20)
    for path, problem in (
        (tmp_path / "absent", "absent: cannot be read: No such file"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(UsageError, match=problem):
            list(read_lines(path))


def test_a_line_of_200_mb_takes_little_more_memory_than_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"short": 1}\n')
    with path.open("ab") as file:
        file.truncate(200_000_000)  # takes no room on the disk
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from benchctl.untrusted.files import read_lines\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: list(read_lines(Path(sys.argv[1])))\n"
        "except ValueError: pass\n"
        "except Exception as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    message, grown_kib = done.stdout.splitlines()
    assert message == f"{path}:2: the line is longer than 16 MiB"
    assert int(grown_kib) * 1024 < 3 * LINE_BYTES


def test_a_file_of_a_directory_that_may_be_a_link_is_read_and_what_is_none_of_it_is_refused_at_once(
    tmp_path: Path,
) -> None:
    root, link = tmp_path / "root", tmp_path / "link"
    (root / "runs").mkdir(parents=True)
    link.symlink_to(root)
    (tmp_path / "outside").write_text("secret")
    (root / "a").write_bytes(b"12345")
    (root / "runs" / "a").write_bytes(b"content")
    for directory in (root, link):
        assert read_file(directory / "runs" / "a", within=directory) == b"content"
    (root / "elsewhere").symlink_to("runs")
    os.mkfifo(root / "pipe")
    for number, target in enumerate(("../outside", "../../outside", "a")):
        (root / "runs" / f"{number}").symlink_to(target)
    for name, error, problem in (
        *((f"runs/{number}", OutsideError, "link") for number in range(3)),
        ("elsewhere/a", OutsideError, "elsewhere is a link"),
        ("runs/../../outside", OutsideError, "leads out"),
        ("pipe", OutsideError, "a FIFO, not a file"),
        ("a", RecordError, "no such file is larger than"),
        ("runs/absent", FileNotFoundError, "runs/absent"),
    ):
        with pytest.raises(error, match=problem):
            read_file(root / name, within=root, max_bytes=4)
    with pytest.raises(OutsideError, match="/dev/null is a device"):
        replace_file(Path("/dev/null"), b"{}", within=Path("/dev"))


def test_files_are_found_at_any_depth_and_not_through_links_and_not_among_too_many_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("root/b/c", "root/a", "outside"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.json").write_text("{}")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "a" / "up").symlink_to(tmp_path / "root")
    root = tmp_path / "root"
    assert files_below(root, "x.json") == [root / "a" / "x.json", root / "b" / "c" / "x.json"]
    monkeypatch.setattr(searching, "SEARCHED_ENTRIES", 4)
    with pytest.raises(RecordError, match="more than 4 entries"):
        files_below(root, "x.json")


def test_files_of_other_tools_are_regular_files_of_their_directory(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("{}")
    kinds = {
        "link": lambda path: path.symlink_to(tmp_path / "outside" / "file"),
        "link to a folder": lambda path: path.symlink_to(tmp_path / "outside"),
        "FIFO": os.mkfifo,
    }
    for kind, put in kinds.items():
        for name in ("run.json", AIPERF_FILE, AIPERF_RECORDS):
            folder = tmp_path / kind / name
            folder.mkdir(parents=True)
            if name == AIPERF_RECORDS:
                (folder / AIPERF_FILE).write_text("{}")
            put(folder / name)
            for read in (is_foreign, read_foreign):
                with within_seconds(10), pytest.raises(RecordError, match=f"{name} is a "):
                    read(str(folder))
    for name in ("config.json", DENSE, EXPERTS):
        folder = tmp_path / "layers" / name
        folder.mkdir(parents=True)
        (folder / DENSE).write_text("layer,tokens,time_us\n")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/zero")
        with within_seconds(10), pytest.raises(RecordError, match=f"{name} is a link"):
            read_layer_tables(folder)


def test_a_file_that_the_user_names_may_be_a_link_or_a_pipe_of_the_shell(tmp_path: Path) -> None:
    result = (
        '{"model_id": "m", "num_prompts": 4, "duration": 2.0, "completed": 4, '
        '"total_input_tokens": 8, "total_output_tokens": 40, '
        '"request_throughput": 2.0, "output_throughput": 20.0}'
    )
    (tmp_path / "a.json").write_text(result)
    (tmp_path / "b.json").symlink_to("a.json")
    line = f"{sys.executable} -m benchctl compare <(cat a.json) b.json"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "output_throughput" in done.stdout, done.stderr


MIB = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\n"
CLOSE = HEAD + b"connection: close\r\n\r\n"


def zipped(content: bytes) -> bytes:
    body = gzip.compress(content, mtime=0)  # the time would differ in every process
    return HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def document(content: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n%s" % (len(content), content)


def endless(head: bytes, part: bytes, sent: list[int]) -> Callable[[Writer], Awaitable[None]]:
    async def answer(writer: Writer) -> None:
        writer.write(head)
        while True:
            writer.write(part)
            await writer.drain()
            sent[0] += len(part)

    return answer


def fetched(
    answer: Callable[[Writer], Awaitable[None]], *, is_plain: bool = True, **limits: float
) -> httpx.Response:
    async def go() -> httpx.Response:
        async with serving(answer) as url:
            plain = control_client(url, Timeouts())
            async with plain if is_plain else httpx.AsyncClient(base_url=url) as client:
                return await fetch(client, "GET", "/v1/models", **limits)

    return asyncio.run(go())


def test_a_document_is_read_whole_also_compressed_unless_its_coding_was_not_requested() -> None:
    for is_plain in (True, False):
        for wire in (document(b'{"a": 1}'), zipped(b'{"a": 1}')):
            response = fetched(writing(wire), is_plain=is_plain)
            assert (response.status_code, response.json()) == (200, {"a": 1})
    for coding in (b"br", b"\x1b[2J"):
        wire = HEAD + b"content-encoding: " + coding + b"\r\ncontent-length: 4\r\n\r\nabcd"
        with pytest.raises(httpx.HTTPError) as caught:
            fetched(writing(wire))
        assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("is_plain", [True, False])
def test_reading_a_document_stops_at_the_bounds_of_size_and_time(is_plain: bool) -> None:
    for head, part in (
        (CLOSE, b" " * MIB),
        (HEAD + b"content-length: 99999999999\r\n\r\n", b" " * MIB),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n" % (MIB, b" " * MIB)),
        (HEAD + b"x-endless: ", b"x" * MIB),
        (HEAD, b"x: 1\r\n" * 10_000),
    ):
        sent = [0]
        with pytest.raises(httpx.RemoteProtocolError):
            fetched(endless(head, part, sent), is_plain=is_plain)
        assert sent[0] < 32 * MIB, head
    bomb = zipped(bytes(40 * MIB))
    assert len(bomb) < MIB
    with pytest.raises(httpx.RemoteProtocolError, match="more than 16 MiB"):
        fetched(writing(bomb), is_plain=is_plain)
    drip = writing(CLOSE, *[part for _ in range(100) for part in (b" ", 0.1)])
    with pytest.raises(httpx.ReadTimeout, match=r"not answered within 0\.5 s"):
        fetched(drip, is_plain=is_plain, limit_s=0.5)


def test_a_silent_server_is_waited_for_as_long_as_the_client_or_the_caller_says() -> None:
    async def go(limit_s: float | None, timeout_s: float) -> None:
        async with serving(writing(10.0)) as url, httpx.AsyncClient(base_url=url, timeout=timeout_s) as client:
            await fetch(client, "GET", "/", limit_s=limit_s)

    for limit_s, timeout_s in ((None, 0.3), (0.3, 30.0)):
        with pytest.raises(httpx.ReadTimeout):
            asyncio.run(asyncio.wait_for(go(limit_s, timeout_s), 8.0))


def test_what_is_no_json_object_is_one_kind_of_error_and_describes_nothing() -> None:
    async def go(content: bytes, *, is_object: bool) -> None:
        async with serving(writing(document(content))) as url, control_client(url, Timeouts()) as client:
            assert await undescribed_fields(client, ["a"]) == ()
            if not is_object:
                with pytest.raises(httpx.DecodingError, match="does not answer with a JSON object"):
                    await fetch_json(client, "/server_info")

    deep = (b"[" * 100_000, b'{"a":' * 100_000)
    for content in (b"[]", b"17", b"null", b"{", b'"a"', b"\xff", b"", *deep, b'{"a": \x00}'):
        asyncio.run(go(content, is_object=False))
    for schema in (5, {"properties": 7}, {"properties": [["a"]]}, {"$ref": 3}, {"$ref": "#/x"}):
        path = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
        asyncio.run(go(json.dumps({"paths": {"/v1/completions": path}}).encode(), is_object=True))


def test_what_a_server_states_of_itself_fits_into_a_record() -> None:
    for stated, recorded in (
        ("vllm 1.2", "vllm 1.2"),
        (4096, 4096),
        (None, None),
        ({"a": [1, 2.5, True]}, {"a": [1, 2.5, True]}),
        ("x" * 3_000_000, "x" * 2000),
        (10**30, 10**30),
        ({"a": 10**5000}, "(a value that no record holds)"),
        (list(range(100_000)), json.dumps(list(range(100_000)), separators=(",", ":"))[:2000]),
    ):
        assert recordable(stated) == recorded


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (b"a 1\n" * 1_000_000, "50000 lines"),
        (b"a_long_name_of_a_counter_of_a_server 1\n" * 1_000_000, "more than 4 MiB"),
        (b"a{" + b",".join(b'l%d="x"' % i for i in range(100_000)) + b"} 1\n", "16384 characters"),
    ],
)
def test_a_page_of_counters_beyond_all_sizes_ends_the_sampler_and_not_the_load(page: bytes, problem: str) -> None:
    async def go() -> None:
        async with serving(writing(document(page))) as url:
            with pytest.raises((OSError, ValueError), match=problem):
                await asyncio.to_thread(next, prometheus_samples(f"{url}/metrics", 1.0, Event()))

    asyncio.run(go())


def test_every_request_for_a_document_goes_through_the_bound() -> None:
    package = Path(benchctl.__file__).parent
    unbounded = re.compile(r"(?:client|control|_client)\.(?:get|post|request|stream)\(")
    files = [path for room in ("engines", "measure", "cli", "micro") for path in (package / room).rglob("*.py")]
    assert len(files) > 80
    assert [str(path) for path in files if unbounded.search(path.read_text())] == []
