"""Files that users name are read within bounds, and refused by name where they are not what they should be."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.hostile_files import HOSTILE, refusal_of, write_hostile
from support.strangers import within_seconds

from benchctl.errors import RecordError, UsageError
from benchctl.interop.foreign_readers import AIPERF_FILE, AIPERF_RECORDS, is_foreign, read_foreign
from benchctl.interop.layer_profile import DENSE, EXPERTS, read_layer_tables
from benchctl.untrusted import LINE_BYTES
from benchctl.untrusted import files as searching
from benchctl.untrusted.files import OutsideError, files_below, read_file, replace_file
from benchctl.untrusted.reading import (
    UnreadableError,
    read_bytes,
    read_csv_records,
    read_json,
    read_lines,
    read_text,
    read_yaml,
)

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
        for read in READERS.values():
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


def test_json_of_python_keeps_infinity_and_a_whole_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"request_rate": Infinity, "face": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "a") == {"request_rate": float("inf"), "face": "\N{GRINNING FACE}"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nested lists", "nested too deeply"),
        ("a whole number of 5,000 digits", "a number has 5000 digits"),
        ("half a pair of surrogates", "surrogates not allowed"),
        ("invalid UTF-8", "not UTF-8 text"),
        ("UTF-16", "not UTF-8 text"),
        ("cut short", "Unterminated string"),
    ],
)
def test_json_is_refused_for_its_own_reason(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(UnreadableError, match=problem):
        read_json(write_hostile(tmp_path / "a", name))


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
        "from benchctl.untrusted.reading import read_lines\n"
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


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join(f'*a{n - 1}' for _ in range(10))}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, "it has 12,345,679,021 values"),
        ("&a [1, *a]", "an alias stands inside of what it repeats"),
        ("a: !!int ''", "IndexError|index"),
        ("a: !!timestamp text", "AttributeError|attribute"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a:\tb\n\tc: d", "cannot start any token"),
        ("a: \0", "special characters are not allowed"),
    ],
)
def test_yaml_is_refused_for_its_own_reason(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UnreadableError, match=problem) as refusal:
        read_yaml(path)
    assert str(path) in str(refusal.value)


def test_yaml_with_some_aliases_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("stage: &stage {rate: 1}\nstages: [*stage, *stage]")
    assert read_yaml(tmp_path / "a")[0] == {"stage": {"rate": 1}, "stages": [{"rate": 1}, {"rate": 1}]}


def test_a_csv_record_is_empty_where_its_row_is_shorter_and_too_many_values_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfa,b\r\n\r\n1,2\r\n3\r\n")
    assert list(read_csv_records(tmp_path / "a.csv")) == [(3, {"a": "1", "b": "2"}), (4, {"a": "3", "b": ""})]
    (tmp_path / "a.csv").write_bytes(b"a,b\n1,2\n1,2,3\n")
    with pytest.raises(UnreadableError, match=r"a\.csv:3: 3 values under 2 names"):
        list(read_csv_records(tmp_path / "a.csv"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "runs").mkdir(parents=True)
    (tmp_path / "outside").write_text("secret")
    return tmp_path / "root"


def test_a_regular_file_is_read_also_where_the_directory_itself_is_a_link(root: Path) -> None:
    (root / "runs" / "a").write_bytes(b"content")
    link = root.with_name("link")
    link.symlink_to(root)
    for directory in (root, link):
        assert read_file(directory / "runs" / "a", within=directory) == b"content"


def test_what_is_no_file_of_the_directory_is_refused_at_once(root: Path) -> None:
    (root / "a").write_bytes(b"12345")
    (root / "runs" / "a").write_bytes(b"content")
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


def test_a_device_is_never_replaced_by_a_file():
    with pytest.raises(OutsideError, match="/dev/null is a device"):
        replace_file(Path("/dev/null"), b"{}", within=Path("/dev"))
    assert Path("/dev/null").is_char_device()


def test_files_are_found_at_any_depth_and_not_through_links(tmp_path: Path) -> None:
    for folder in ("root/b/c", "root/a", "outside"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.json").write_text("{}")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "a" / "up").symlink_to(tmp_path / "root")
    root = tmp_path / "root"
    assert files_below(root, "x.json") == [root / "a" / "x.json", root / "b" / "c" / "x.json"]


def test_a_directory_with_too_many_entries_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "SEARCHED_ENTRIES", 9)
    for number in range(10):
        (tmp_path / str(number)).touch()
    with pytest.raises(RecordError, match="more than 9 entries"):
        files_below(tmp_path, "x")


def put(path: Path, kind: str, outside: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": outside / "file", "link to a folder": outside, "device": Path("/dev/zero")}[kind])


def test_files_of_other_tools_are_regular_files_of_their_directory(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("{}")
    for kind in ("link", "link to a folder", "FIFO"):
        for name in ("run.json", f"a/{AIPERF_FILE}", f"b/{AIPERF_RECORDS}"):
            path = tmp_path / kind / name.replace("/", "-") / name
            path.parent.mkdir(parents=True)
            if path.name == AIPERF_RECORDS:
                path.with_name(AIPERF_FILE).write_text("{}")
            put(path, kind, tmp_path / "outside")
            for read in (is_foreign, read_foreign):
                with within_seconds(10), pytest.raises(RecordError, match=f"{path.name} is a "):
                    read(str(tmp_path / kind / name.replace("/", "-")))
    for name in ("config.json", DENSE, EXPERTS):
        root = tmp_path / "layers" / name
        root.mkdir(parents=True)
        (root / DENSE).write_text("layer,tokens,time_us\n")
        put(root / name, "device", tmp_path)
        with within_seconds(10), pytest.raises(RecordError, match=f"{name} is a link"):
            read_layer_tables(root)


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
