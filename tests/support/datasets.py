"""Where the real data sets lie when a machine has them, and short names for a source and a selection."""

from pathlib import Path

import pytest

from benchctl.workload.datasets.base import Selection, SourceFile

DATA = Path(__file__).resolve().parents[3] / "shared/data"
GSM8K = DATA / "gsm8k/test.jsonl"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data sets are not at {DATA}")


def source(path: Path, kind: str) -> SourceFile:
    return SourceFile(path=path, kind=kind, dataset=kind)


def first(num_prompts: int) -> Selection:
    return Selection(num_prompts=num_prompts, method="first", seed=0)
