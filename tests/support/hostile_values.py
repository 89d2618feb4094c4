"""Values that a profile or a command line may be given by mistake or by malice, and profiles to give them to."""

import textwrap
from collections.abc import Iterator
from typing import Final

import yaml

from benchctl.profile.engine_table import options_class
from benchctl.profile.errors import profile_keys
from benchctl.profile.model import Sampling
from benchctl.profile.sections import RequestOptions

VALUES: Final = (
    "{}", "[]", "[1,[2]]", "null", "true", "-1", "0", "1", "1.5", "1e26", "1e400", "-0.0", "5e-324", "1000000000",
    "9" * 20, "9" * 400, "9" * 5000, ".nan", ".inf", "0x10", "''", "' '", "x", "10GB", "*", "'*'",
    "'" + "x" * 5000 + "'",
    '"a\\0b"', '"a\\nb"', '"\\x1b[31m"', '"\\u202e"', '"\\ud800"', "'١٢'", "${HOME}", "'${NOPE}'", "../..",
    "/dev/full", "2026-01-01", "!!python/object:os.system x", "*alias", "&a 1", "[" * 20 + "]" * 20, "[" * 500,
    "{a: {b: [1]}}", "{'': 1}", '{"\\0": 1}', '{"a\\nb": "c\\nd"}', "{1: 2}", "[a, a]", "['']",
    "[0.5, 99999999999999999999999]",
    "[{a: 1}]", "[null]",
)  # fmt: skip
"""In YAML, as ``--set`` takes them."""

_LOAD: Final = "num_prompts: 2, output_len: 2, num_warmups: 0"
PROFILES: Final = {
    "sim": f"""
        engine: {{kind: sim}}
        blocks: 2
        workload: {{dataset: synthetic, input_len: 4, {_LOAD}, arrival: {{kind: closed-loop, max_concurrency: 2}}}}
        variants: {{baseline: {{}}, other: {{server: {{max_num_seqs: 4}}}}}}
        """,
    "guided": f"""
        engine: {{kind: sim}}
        blocks: 6
        workload:
          {{dataset: synthetic, input_len: {{mean: 4, cv: 0.5, max: 9}}, {_LOAD},
           arrival: {{kind: poisson, request_rate: 5}}}}
        sampling: {{temperature: 0.7, top_k: 5}}
        stopping: {{precision: 0.01}}
        variants:
          baseline: {{}}
          guided: {{server: {{value_model: qwen2.5-1.5b}}, guidance: {{value_scale: 0.0}}, controls: true}}
        sweep: {{top_k: [3, 5], max_num_seqs: [4]}}
        """,
    "speculation": f"""
        engine: {{kind: sim, options: {{cost_model: roofline}}}}
        blocks: 2
        model: llama-3.1-8b
        workload: {{dataset: synthetic, input_len: [4, 5], {_LOAD}, arrival: {{kind: gamma, request_rate: 5}}}}
        variants:
          baseline: {{}}
          drafted: {{server: {{num_speculative_tokens: 2, acceptance: [0.5, 0.5], draft_cost: 0.1}}}}
        """,
    **{
        kind: f"""
        engine: {{kind: {kind}{options}}}
        blocks: 2
        workload: {{dataset: generated, {_LOAD}, arrival: {{kind: burst}}}}
        variants: {{baseline: {{}}, other: {{sampling: {{top_k: 4}}, request: {{extra_body: {{a: 1}}}}}}}}
        """
        for kind, options in [
            ("vllm", ""), ("vllm-lenvm", ""), ("sglang", ""), ("sglang-lenvm", ", options: {revision: V0}"),
            ("llamacpp", ""), ("transformers", ""),
        ]
    },
    "attach": f"""
        engine: {{kind: attach, options: {{url: "localhost:8000"}}}}
        blocks: 2
        workload: {{dataset: generated, {_LOAD}, arrival: {{kind: constant, request_rate: 5}}}}
        variants: {{baseline: {{}}, other: {{request: {{headers: {{User-Agent: b}}}}}}}}
        """,
}  # fmt: skip
"""Texts of small profiles, by their names."""


def profile_text(name: str) -> str:
    """The text of one of ``PROFILES``."""
    return f"name: {name}\n{textwrap.dedent(PROFILES[name])}"


def keys_of(name: str) -> Iterator[str]:
    """Every key of a profile and every option of its engine, in each place that takes it, and unknown ones."""
    document = yaml.safe_load(profile_text(name))
    variants = list(document["variants"])
    for key in profile_keys():
        yield from (
            (key.path.replace("<name>", variant) for variant in variants) if "<name>" in key.path else (key.path,)
        )
    of_engine = profile_keys(options_class(document["engine"]["kind"]), "engine.options.")
    options = [key.path.rpartition(".")[2] for key in of_engine]
    yield from (f"engine.options.{option}" for option in options)
    yield from (f"variants.{variants[-1]}.server.{option}" for option in options)
    yield from (f"variants.{variants[-1]}.sampling.{key}" for key in Sampling.model_fields)
    yield from (f"variants.{variants[-1]}.request.{key}" for key in RequestOptions.model_fields)
    yield from (
        "sweep.top_k", "sweep.max_num_seqs", "sweep.request.extra_body.q", "sweep.server.env.A", "sweep.nope",
        "variants.new", "request.extra_body.a", "request.extra_body.seed", "request.headers.X-Y", "extends", "nope",
        "engine.preset", "per_engine", "per_engine.sim", "for_unguided_engines",
        "workload.columns.prompt",
    )  # fmt: skip
