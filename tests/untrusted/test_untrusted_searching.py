"""Files of other tools are found as regular files of the directory that the user names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.strangers import within_seconds

from benchctl.errors import RecordError
from benchctl.interop.foreign_readers import AIPERF_FILE, AIPERF_RECORDS, is_foreign, read_foreign
from benchctl.interop.layer_profile import DENSE, EXPERTS, read_layer_tables
from benchctl.untrusted import files as searching
from benchctl.untrusted.files import files_below


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


@pytest.mark.parametrize("kind", ["link", "link to a folder", "FIFO"])
@pytest.mark.parametrize("name", ["run.json", f"a/{AIPERF_FILE}", f"b/{AIPERF_RECORDS}"])
def test_results_of_another_tool_are_regular_files_of_their_directory(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("{}")
    path = tmp_path / "root" / name
    path.parent.mkdir(parents=True)
    if path.name == AIPERF_RECORDS:
        path.with_name(AIPERF_FILE).write_text("{}")
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "outside" / ("file" if kind == "link" else ""))
    for read in (is_foreign, read_foreign):
        with within_seconds(10), pytest.raises(RecordError, match=f"{path.name} is a "):
            read(str(tmp_path / "root"))


@pytest.mark.parametrize("name", ["config.json", DENSE, EXPERTS])
def test_tables_of_layers_are_regular_files_of_their_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / DENSE).write_text("layer,tokens,time_us\n")
    (tmp_path / "root" / name).unlink(missing_ok=True)
    (tmp_path / "root" / name).symlink_to("/dev/zero")
    with within_seconds(10), pytest.raises(RecordError, match=f"{name} is a link"):
        read_layer_tables(tmp_path / "root")


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
