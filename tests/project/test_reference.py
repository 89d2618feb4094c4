"""The pages of ``docs/reference`` are what the code says today."""

from pathlib import Path

import pytest
from generate import PAGES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_current(name: str) -> None:
    written = (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    assert written == PAGES[name](), "run: python docs/generate.py"


def test_every_page_is_generated() -> None:
    assert {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")} == set(PAGES)


def test_every_command_has_a_meaning_for_each_option() -> None:
    for line in PAGES["commands"]().splitlines():
        if line.startswith("| `"):
            assert line.split("|")[2].strip(), line
