"""The checks of neighbours on file: by host, devices, server, model and slots, newest first."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from benchctl.cli.app import app
from benchctl.errors import RecordError, UsageError
from benchctl.records.stores.neighbour_store import STORE_VARIABLE, find_checks, key_of, store_check, stored_checks
from benchctl.records.stores.stores import (
    NEIGHBOURS_FILE,
    NeighbourCheck,
    NeighbourEffect,
    NeighbourSlot,
    load_neighbours,
    write_neighbours,
)


def check(**changes: Any) -> NeighbourCheck:
    effect = NeighbourEffect(
        ratio=1.2, ci_low=1.1, ci_high=1.3, num_blocks=8, margin_frac=0.01, finding="disturbed"
    )
    first = NeighbourCheck(
        schema_version=3,
        measured_at="2026-11-23T10:00:00Z",
        source="/results/busy-neighbours/1",
        host="box",
        engine="vllm",
        engine_sha256="1" * 64,
        engine_version="0.32.0",
        model="models/qwen",
        request_set_sha256="2" * 64,
        slots=tuple(NeighbourSlot(index=i, cores=(i,)) for i in range(2)),
        confidence=0.995,
        metrics={"tpot_ms": effect},
        lost_alone=(0, 8),
        lost_beside=(0, 8),
    )
    return msgspec.structs.replace(first, **changes)


def slots(number: int, cores: int = 1) -> tuple[NeighbourSlot, ...]:
    return tuple(NeighbourSlot(index=i, cores=tuple(range(i * cores, (i + 1) * cores))) for i in range(number))


def test_a_check_is_read_as_it_was_stored_and_the_newest_comes_first(tmp_path: Path) -> None:
    later = check(measured_at="2026-11-24T10:00:00Z")
    for each in (check(), later, later):
        store_check(tmp_path, each)
    assert [entry.content for entry in stored_checks(tmp_path, key_of(check()))] == [later, check()]


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "other"},
        {"gpus": ("H100",)},
        {"engine": "sglang"},
        {"engine_sha256": "3" * 64},
        {"model": "llama"},
        {"slots": slots(4)},
        {"slots": slots(2, cores=2)},
    ],
)
def test_another_host_server_model_or_number_of_neighbours_has_another_key(changes: dict[str, Any]) -> None:
    assert key_of(check(**changes)) != key_of(check())


def test_the_same_slots_on_other_cores_have_the_same_key() -> None:
    moved = tuple(NeighbourSlot(index=i, cores=(i + 2,)) for i in range(2))
    assert key_of(check(slots=moved)) == key_of(check())


def test_a_damaged_check_is_named_and_does_not_count(tmp_path: Path) -> None:
    path = store_check(tmp_path, check())
    path.write_text('{"schema_version": 3, "slots": []}')
    (entry,) = stored_checks(tmp_path)
    assert entry.content is None
    assert str(path) in (entry.problem or "")


def test_a_key_can_be_abbreviated_and_an_unknown_one_is_an_error(tmp_path: Path) -> None:
    store_check(tmp_path, check())
    assert find_checks(tmp_path, "box-vllm-qwen-x2")[0].content == check()
    with pytest.raises(UsageError, match=r"no check of neighbours is filed under 'nowhere'.*known keys: box-vllm"):
        find_checks(tmp_path, "nowhere")


def test_a_directory_without_a_check_has_none_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    assert load_neighbours(tmp_path) is None
    write_neighbours(tmp_path / NEIGHBOURS_FILE, check())
    assert load_neighbours(tmp_path) == check()
    (tmp_path / NEIGHBOURS_FILE).write_text("{")
    with pytest.raises(RecordError, match=r"neighbours\.json.*remove the file, or check again"):
        load_neighbours(tmp_path)


def test_stored_checks_are_listed_shown_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path))
    store_check(tmp_path, check())
    call = CliRunner().invoke
    listed = call(app, ["noise", "list"]).output
    assert key_of(check()) in listed
    assert "disturbed" in listed
    (document,) = json.loads(call(app, ["noise", "list", "--json"]).output)["neighbours"]
    assert document["metrics"]["tpot_ms"]["ratio"] == 1.2
    shown = call(app, ["noise", "show", "box-vllm"]).output
    assert "2 blocks at a time, vllm 0.32.0 with models/qwen on box" in shown
    assert "disturbed beside 1 neighbour: tpot_ms +20% [+10%, +30%]" in shown
    assert json.loads(call(app, ["noise", "show", "box-vllm", "--json"]).output)["confidence"] == 0.995
    assert "removed 1 measurement of box-vllm" in call(app, ["noise", "remove", key_of(check())]).output
    assert stored_checks(tmp_path) == ()
