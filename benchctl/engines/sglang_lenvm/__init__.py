"""SGLang's LenVM fork: a value model beside the served one guides its sampler. Its counters are SGLang's."""

from typing import Final

from benchctl.profile.engine_options import EngineSpec, RequestFields

SPEC: Final = EngineSpec(
    kind="sglang-lenvm",
    options=f"{__name__}.options:SglangLenvmOptions",
    implementation=f"{__name__}.engine:SglangLenvmEngine",
    guides=True,
    coded_options={
        "--enable-lvm-guided-sampling": ("value_model",),
        "--lvm-guided-fn": ("guided_fn", "value_model"),
        "--lvm-guided-inproc": ("value_model",),
        "--lvm-guided-inproc-json-model-override-args": ("value_architecture", "value_model"),
        "--lvm-guided-inproc-mem-fraction-static": ("value_mem_fraction_static", "value_model"),
        "--lvm-guided-inproc-model-path": ("value_model",),
        "--lvm-guided-inproc-model-revision": ("value_model_revision", "value_model"),
    },
    request_fields=RequestFields(constraints=frozenset({"json", "regex", "choice", "grammar"})),
    installed_by="pip install -e sglang-LenVM/python, in an environment of its own that engine.python names",
    is_optional_check=True,
)
