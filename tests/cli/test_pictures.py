"""Pictures that commands are asked for: their kinds, and that a run without one starts nothing that draws."""

from pathlib import Path

import pytest
from support.cli import benchctl
from support.results.builders import write_results


@pytest.mark.parametrize(
    "arguments",
    [
        ("speculation", "--acceptance", "0.8", "--draft-tokens", "2", "--plot", "x.jpg"),
        ("steptime", "fit", "r", "-o", "model.json", "--picture", "x.jpg"),
        ("steptime", "evaluate", "r", "--picture", "x.jpg"),
    ],
    ids=["speculation", "fit", "evaluate"],
)
def test_a_picture_of_an_unknown_kind_is_refused_before_any_work(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    write_results(tmp_path / "r")
    refused = benchctl(*arguments, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "x.jpg: name a picture that ends in .png, .svg, .pdf" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


@pytest.mark.parametrize(("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<svg"), (".pdf", b"%PDF")])
def test_the_suffix_of_a_picture_says_its_kind(tmp_path: Path, suffix: str, beginning: bytes) -> None:
    path = tmp_path / f"x{suffix}"
    drawn = benchctl("speculation", "--acceptance", "0.8", "--draft-tokens", "2", "--plot", path)
    assert drawn.returncode == 0, drawn.stderr
    assert f"picture: {path}" in drawn.stdout
    assert path.read_bytes().startswith(beginning)
