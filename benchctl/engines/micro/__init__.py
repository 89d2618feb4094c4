"""Forward passes of a model with random weights: no server, no requests, one record for each pass."""

from typing import Final

from benchctl.profile.engine_options import EngineSpec

SPEC: Final = EngineSpec(
    kind="micro",
    options=f"{__name__}.options:MicroOptions",
    implementation=f"{__name__}.engine:MicroEngine",
    serves_requests=False,
)
