"""No prompts, for engines that compute without requests."""

from typing import Final

from benchctl.workload.datasets.base import MadeDataset

DATASET: Final = MadeDataset(make=lambda _workload, _seed: ())
