"""The pages of ``docs/reference`` are what the code says today."""

from pathlib import Path

import pytest

from benchctl.cli.commands.reference import Topic, reference_page

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("topic", list(Topic))
def test_a_reference_page_is_current(topic: Topic) -> None:
    written = (ROOT / "docs" / "reference" / f"{topic}.md").read_text(encoding="utf-8")
    assert written == reference_page(topic), f"run: benchctl reference {topic} > docs/reference/{topic}.md"


def test_every_topic_is_offered_by_the_command_and_every_page_is_generated() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert {topic.value for topic in Topic} == pages


def test_every_command_has_a_meaning_for_each_option() -> None:
    for line in reference_page(Topic.COMMANDS).splitlines():
        if line.startswith("| `"):
            assert line.split("|")[2].strip(), line
