"""Files of a stranger's directory are opened only where they are regular files of that directory."""

import os
from pathlib import Path

import pytest

from benchctl.errors import RecordError
from benchctl.untrusted.files import OutsideError, open_file, read_file, replace_file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "runs").mkdir(parents=True)
    (tmp_path / "outside").write_text("secret")
    return tmp_path / "root"


def test_a_regular_file_is_read(root: Path) -> None:
    (root / "runs" / "a").write_bytes(b"content")
    assert read_file(root / "runs" / "a", within=root) == b"content"


def test_the_directory_itself_may_be_a_link(root: Path) -> None:
    (root / "a").write_bytes(b"content")
    link = root.with_name("link")
    link.symlink_to(root)
    assert read_file(link / "a", within=link) == b"content"


@pytest.mark.parametrize("target", ["../outside", "../../outside", "a"])
def test_a_link_is_refused_wherever_it_leads(root: Path, target: str) -> None:
    (root / "a").write_bytes(b"content")
    (root / "runs" / "link").symlink_to(target)
    with pytest.raises(OutsideError, match="link"):
        open_file(root / "runs" / "link", within=root)


def test_a_linked_folder_is_refused(root: Path) -> None:
    (root / "elsewhere").symlink_to("runs")
    (root / "runs" / "a").write_bytes(b"content")
    with pytest.raises(OutsideError, match="elsewhere is a link"):
        open_file(root / "elsewhere" / "a", within=root)


def test_parents_are_refused(root: Path) -> None:
    with pytest.raises(OutsideError, match="leads out"):
        open_file(root / "runs" / ".." / ".." / "outside", within=root)


def test_a_fifo_is_refused_at_once(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(OutsideError, match="a FIFO, not a file"):
        open_file(root / "pipe", within=root)


def test_a_file_over_its_bound_is_refused(root: Path) -> None:
    (root / "a").write_bytes(b"12345")
    with pytest.raises(RecordError, match="no such file is larger than"):
        read_file(root / "a", within=root, max_bytes=4)


def test_a_missing_file_is_reported_by_its_path(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match="runs/absent"):
        open_file(root / "runs" / "absent", within=root)


def test_a_device_is_never_replaced_by_a_file():
    with pytest.raises(OutsideError, match="/dev/null is a device"):
        replace_file(Path("/dev/null"), b"{}", within=Path("/dev"))
    assert Path("/dev/null").is_char_device()
