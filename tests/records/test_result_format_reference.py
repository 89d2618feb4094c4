"""The reference of the result format: complete, and generated from the record types."""

from pathlib import Path

from generate import result_format_reference
from support.results.builders import write_results


def test_every_file_of_a_result_directory_is_in_the_reference(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results")
    names = {path.name for path in results.path.rglob("*") if path.is_file()}
    reference = result_format_reference()
    assert names
    assert [name for name in sorted(names) if f"{name}`" not in reference] == []


def test_every_field_has_a_meaning_and_times_have_units() -> None:
    lines = [line for line in result_format_reference().splitlines() if line.count(" | ") == 4]
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert len(rows) > 150
    for name, kind, unit, _, meaning in rows:
        assert kind.strip(), name
        assert len(meaning.rstrip(" |")) > 1, name
        assert ("_ns" in name) == (unit == "ns"), name
