"""A server that someone else started, addressed in the dialect of its kind and never watched or ended."""

from typing import Final

from benchctl.profile.engine_options import EngineSpec

SPEC: Final = EngineSpec(
    kind="attach", options=f"{__name__}.options:AttachOptions", implementation=f"{__name__}.engine:AttachEngine"
)
