"""One real Slurm for the tests of a process; where none can be started, they are skipped with the reason."""

from collections.abc import Iterator

import pytest
from support.slurm import Slurm, missing_slurm, running_slurm


@pytest.fixture(scope="session", name="cluster")
def _cluster() -> Iterator[Slurm]:
    if (reason := missing_slurm()) is not None:
        pytest.skip(reason)
    with running_slurm() as slurm:
        yield slurm


@pytest.fixture(name="slurm")
def _slurm(cluster: Slurm) -> Iterator[Slurm]:
    """The Slurm, whose queue is empty before and after a test, with all nodes up."""
    yield cluster
    for words in (("scancel", "--me"), ("scancel", "--me", "--signal=KILL")):
        if cluster.queue():
            cluster.command(*words)
    cluster.wait_empty()
