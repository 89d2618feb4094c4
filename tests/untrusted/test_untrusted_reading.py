"""Files that users name are read within bounds, and refused by name where they are not what they should be."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchctl.errors import UsageError
from benchctl.untrusted import LINE_BYTES
from benchctl.untrusted.reading import (
    UnreadableError,
    read_bytes,
    read_csv_records,
    read_json,
    read_lines,
    read_text,
    read_yaml,
)
from tests.support.hostile_files import HOSTILE, refusal_of, write_hostile

SIGNS = st.text(alphabet='{}[]",:\\ud8019.eE+-&*!<> \n\t', max_size=80)
READERS = {
    "json": read_json,
    "yaml": read_yaml,
    "csv": lambda path: list(read_csv_records(path)),
    "text": read_text,
    "lines": lambda path: list(read_lines(path)),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", READERS)
def test_a_reader_returns_or_names_the_file_in_one_short_line(tmp_path: Path, kind: str, name: str) -> None:
    path = write_hostile(tmp_path / "stranger", name)
    refusal = refusal_of(lambda: READERS[kind](path))
    assert not refusal or (refusal.startswith(str(path)) and "\n" not in refusal and len(refusal) < 500), refusal


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=st.binary(max_size=200) | SIGNS.map(str.encode))
def test_no_content_makes_a_reader_fail_otherwise(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "stranger"
    path.write_bytes(content)
    for read in READERS.values():
        refusal = refusal_of(lambda read=read: read(path))  # type: ignore[misc]
        assert not refusal or str(path) in refusal


def test_json_of_python_keeps_infinity(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"request_rate": Infinity}')
    assert read_json(tmp_path / "a") == {"request_rate": float("inf")}


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


def test_a_whole_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('"\\ud83d\\ude00"')
    assert read_json(tmp_path / "a") == "\N{GRINNING FACE}"


def test_reading_stops_at_the_bound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    assert len(read_bytes(tmp_path / "a", 3_000_000)) == 3_000_000
    with pytest.raises(UnreadableError, match="larger than 1 MiB"):
        read_bytes(tmp_path / "a", 1 << 20)
    with pytest.raises(UnreadableError, match="larger than 1 MiB"):
        read_bytes(Path("/dev/zero"), 1 << 20)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent: cannot be read: No such file"):
        read_bytes(tmp_path / "absent")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        list(read_lines(tmp_path))


def test_a_line_of_200_mb_takes_little_more_memory_than_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"short": 1}\n')
        for _ in range(200):
            file.write(b"x" * 1_000_000)
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


def test_a_csv_record_is_empty_where_its_row_is_shorter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfa,b\r\n\r\n1,2\r\n3\r\n")
    assert list(read_csv_records(tmp_path / "a.csv")) == [(3, {"a": "1", "b": "2"}), (4, {"a": "3", "b": ""})]


def test_a_csv_row_with_too_many_values_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\n1,2\n1,2,3\n")
    with pytest.raises(UnreadableError, match=r"a\.csv:3: 3 values under 2 names"):
        list(read_csv_records(tmp_path / "a.csv"))
