"""An experiment that goes on on another machine: a block that was begun elsewhere is measured again whole."""

from pathlib import Path

import msgspec
import pytest
from support.cli import WITHOUT_SERVERS, benchctl, only_result

from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import record_run
from benchctl.records.schema import NodeGpu, NodeInfo

SMALL = ["workload.num_prompts=1", "workload.output_len=8", "gates=[]"]
N7 = NodeInfo(name="n7", hostname="n7")
OPTIONS = ["--engine", "sim-exact", "--quiet", *(word for override in SMALL for word in ("--set", override))]


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    """Two blocks of two runs with the clock of a real engine, on n7; the last run has failed."""
    begun = benchctl("run", "ci-smoke", *OPTIONS, "--blocks", "2", cwd=tmp_path, **WITHOUT_SERVERS)
    assert begun.returncode == 0
    path = only_result(tmp_path)
    for index in range(4):
        edit(path, index, clock="host", node=N7)
    edit(path, 3, state="failed")
    return path


def edit(path: Path, index: int, **changes: object) -> None:
    run = ResultDirectory(path).runs()[index]
    run.write(msgspec.structs.replace(run.read(), **changes))
    record_run(ResultDirectory(path), run.path.name)


def attempts(path: Path) -> list[int]:
    return [run.read().attempt for run in ResultDirectory(path).runs()]


def test_a_block_that_was_begun_elsewhere_is_measured_again_whole_and_the_user_is_told(path):
    resume, here = ("run", "--resume", path), {"BENCHCTL_NODE_NAME": "n7"}
    planned = benchctl(*resume, "--dry-run")
    assert "2 of 4 runs left to measure" in planned.stdout
    assert "block 1 was begun on n7; all its runs are measured again here" in planned.stderr
    edit(path, 2, node=msgspec.structs.replace(N7, gpus=(NodeGpu(index=0, name="fake", uuid="GPU-1"),)))
    planned = benchctl(*resume, "--dry-run", **here)
    assert "block 1 was begun on other devices of this node" in planned.stderr
    assert "2 of 4 runs left to measure" in planned.stdout
    edit(path, 2, node=N7)
    assert attempts(path) == [1, 1, 1, 1]
    on_n7 = benchctl(*resume, "--quiet", **here, **WITHOUT_SERVERS)
    assert on_n7.returncode == 0, on_n7.stderr
    assert "measured again" not in on_n7.stderr
    assert attempts(path) == [1, 1, 1, 2]
    edit(path, 3, state="failed", clock="host", node=N7)
    resumed = benchctl(*resume, "--quiet", **WITHOUT_SERVERS)
    assert resumed.returncode == 0, resumed.stderr
    assert "block 1 was begun on n7; all its runs are measured again here" in resumed.stderr
    assert "runs: 2 done, 2 done before" in resumed.stdout
    assert attempts(path) == [1, 1, 2, 3]
    assert [run.read().node_name for run in ResultDirectory(path).runs()][:2] == ["n7", "n7"]
    assert benchctl("verify", path).returncode == 0
