"""An experiment that goes on on another machine: a block that was begun elsewhere is measured again whole."""

import platform
from pathlib import Path

import msgspec
import pytest
from support.cli import benchctl, only_result

from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import record_run
from benchctl.records.schema import NodeGpu

pytestmark = pytest.mark.slow
SMALL = ["workload.num_prompts=1", "workload.output_len=8", "engine.options.time_scale=20", "gates=[]"]
OPTIONS = ["--engine", "sim-exact", "--quiet", *(word for override in SMALL for word in ("--set", override))]


@pytest.fixture(name="begun_on_n7")
def _begun_on_n7(tmp_path: Path) -> Path:
    """Two blocks of two runs with the clock of a real engine, on n7; the last run was not measured there."""
    environment = {"BENCHCTL_NODE_NAME": "n7"}
    assert benchctl("run", "ci-smoke", *OPTIONS, "--blocks", "2", cwd=tmp_path, **environment).returncode == 0
    path = only_result(tmp_path)
    runs = ResultDirectory(path).runs()
    for run in runs:
        run.write(msgspec.structs.replace(run.read(), clock="host"))
    runs[-1].write(msgspec.structs.replace(runs[-1].read(), state="failed"))
    for run in runs:
        record_run(ResultDirectory(path), run.path.name)
    return path


def attempts(path: Path) -> list[int]:
    return [run.read().attempt for run in ResultDirectory(path).runs()]


def nodes(path: Path) -> list[str | None]:
    return [run.read().node_name for run in ResultDirectory(path).runs()]


def test_a_block_that_was_begun_on_another_node_is_measured_again_whole_and_the_user_is_told(begun_on_n7):
    planned = benchctl("run", "--resume", begun_on_n7, "--dry-run")
    assert "2 of 4 runs left to measure" in planned.stdout
    assert "block 1 was begun on n7; all its runs are measured again here" in planned.stderr
    assert attempts(begun_on_n7) == [1, 1, 1, 1]
    resumed = benchctl("run", "--resume", begun_on_n7, "--quiet")
    assert resumed.returncode == 0, resumed.stderr
    assert "block 1 was begun on n7; all its runs are measured again here" in resumed.stderr
    assert "runs: 2 done, 2 done before" in resumed.stdout
    assert attempts(begun_on_n7) == [1, 1, 2, 2]
    assert nodes(begun_on_n7) == ["n7", "n7", platform.node(), platform.node()]
    assert benchctl("verify", begun_on_n7).returncode == 0


def test_on_the_same_node_only_the_missing_run_is_measured(begun_on_n7):
    resumed = benchctl("run", "--resume", begun_on_n7, "--quiet", BENCHCTL_NODE_NAME="n7")
    assert resumed.returncode == 0, resumed.stderr
    assert "measured again" not in resumed.stderr
    assert attempts(begun_on_n7) == [1, 1, 1, 2]


def test_other_devices_of_the_same_node_are_elsewhere_too(begun_on_n7):
    first_of_last_block = ResultDirectory(begun_on_n7).runs()[2]
    record = first_of_last_block.read()
    assert record.node is not None
    node = msgspec.structs.replace(record.node, gpus=(NodeGpu(index=0, name="fake", uuid="GPU-1"),))
    first_of_last_block.write(msgspec.structs.replace(record, node=node))
    planned = benchctl("run", "--resume", begun_on_n7, "--dry-run", BENCHCTL_NODE_NAME="n7")
    assert "block 1 was begun on other devices of this node" in planned.stderr
    assert "2 of 4 runs left to measure" in planned.stdout
