"""SGLang's LenVM fork: a value model beside the served one guides its sampler. Its counters are SGLang's."""

from typing import Final

from benchctl.profile.engine_table import EngineSpec

SPEC: Final = EngineSpec(
    kind="sglang-lenvm",
    options=f"{__name__}.options:SglangLenvmOptions",
    implementation=f"{__name__}.engine:SglangLenvmEngine",
    guides=True,
    installed_by="pip install -e sglang-LenVM/python, in an environment of its own that engine.python names",
    is_optional_check=True,
)
