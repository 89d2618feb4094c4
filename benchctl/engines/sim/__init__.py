"""The simulator as an engine: ``benchctl.sim`` in a process of its own. Its counters have vLLM's names."""

from typing import Final

from benchctl.profile.engine_options import EngineSpec

SPEC: Final = EngineSpec(
    kind="sim", options=f"{__name__}.options:SimOptions", implementation=f"{__name__}.engine:SimEngine", guides=True
)
