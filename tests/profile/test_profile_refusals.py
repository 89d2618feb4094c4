"""Values of a command line that are refused: by their key, with the remedy, and no secret repeated."""

import pytest

from benchctl.errors import ProfileError
from benchctl.profile.load import load_profile

KEY = "sk-abcdefghijklmnopqrstuvwx"
TEN = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"
GUIDED = "variants.guided.controls=true"
SLO = "slo={ttft_ms: 200}"
AT_ONCE = "primary_metrics=[capacity_concurrency]"
REFUSED = {
    "ci-smoke": [
        # Bounds of every number and text.
        ("workload.arrival.max_concurrency=65537", "is 65537; it must be at most 65536"),
        ("workload.num_prompts=0", "is 0; it must be at least 1"),
        ("timeouts.ready_s=1e7", "is 10000000.0; it must be at most 1000000"),
        ("seed=9223372036854775808", "is 9223372036854775808; it must be at most 9223372036854775807"),
        ("request.extra_body.a=9223372036854775808", "is 9223372036854775808; a whole number has 64 bits at most"),
        ("workload.max_tokens=1e400", "'1e400' is not a number that can be stored; write another"),
        (f"blocks={'9' * 5000}", f"{repr('9' * 60)[:57]}... is not a number that can be stored; write another"),
        ('model="a\\nb"', r"is 'a\nb', which has control characters; remove them"),
        ('model="\\x1b[31mred"', r"is '\x1b[31mred', which has control characters; remove them"),
        (f"model={'x' * 300}", "longer than a name (255 bytes) or a path can be; shorten it"),
        (f"description={'x' * 70_000}", "has 70,000 characters, more than 65,536; shorten it"),
        ("variants={%s: {}}" % ("x" * 129), "has more than 128 characters; shorten it"),
        ('request.headers={"a\\nb": c}', r"'a\nb' has control characters or more than 256 of any"),
        # What no memory holds.
        (
            ["workload.dataset=synthetic", "workload.num_prompts=1000", "workload.input_len=1000000"],
            "asks for 1,000,000,000 prompt tokens, which no memory holds, more than 500,000,000",
        ),
        (
            [f"sweep.{factor}={TEN}" for factor in ("top_k", "max_num_seqs", "request.extra_body.a")]
            + [f"variants.v{i}.description=x" for i in range(3)],
            "makes 4,001 arms of the variants, more than 1,000",
        ),
        (
            ["variants.v0={server: {value_model: m}, guidance: {}, controls: true}"]
            + [f"sweep.request.extra_body.{name}={TEN}" for name in "abcdefghijkl"],
            "has 1,000,000,000,000 cells, more than 1,000",
        ),
        (
            ["blocks=10000", *(f"variants.v{i}.description=x" for i in range(10))],
            "which makes 120,000 runs, more than 100,000",
        ),
        # What no job script can hold.
        ("cluster.time=1h", "is '1h'; write HH:MM:SS, D-HH:MM:SS, or minutes, above 0"),
        ("cluster.time='0:00'", "write HH:MM:SS"),
        ("cluster.partition='a b'", "must match"),
        ("cluster.account='x\"#'", "must match"),
        ("cluster.exclude='node1; rm'", "must match"),
        ("cluster.container_runtime=docker", "allowed are apptainer, pyxis"),
        ('cluster.setup=["a\\nb"]', "control characters"),
        ("cluster.setup=[export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345]", "looks like a secret"),
        ("cluster.nodes=2", "unknown key"),
        # An objective.
        ("slo={}", "slo: names no limit; set ttft_ms, tpot_ms or e2el_ms"),
        ("slo={share: 0.9}", "slo: names no limit; set ttft_ms, tpot_ms or e2el_ms"),
        # A capacity.
        ("capacity={}", "capacity: is read with capacity_concurrency or capacity_rate in primary_metrics; add one"),
        (["capacity={}", AT_ONCE], "is capacity_concurrency, and requests have no objective; set slo, such as"),
        ([SLO, AT_ONCE], "primary_metrics: has capacity_concurrency, which lies between loads of several sizes"),
        ([SLO, AT_ONCE, "sweep.max_concurrency=[2, 4]"], "name three or more in sweep.max_concurrency, or"),
        (
            [SLO, AT_ONCE, "sweep.max_concurrency=[2, 4, 8]", "capacity={}"],
            "capacity: finds sizes, and sweep.max_concurrency names them; set capacity: null, or leave the factor",
        ),
        ([SLO, AT_ONCE, "capacity={smallest: 8, largest: 16}"], "capacity: spans less than 4 times"),
        (
            [SLO, AT_ONCE, "capacity={}", "stopping={precision: 0.01}", "blocks=8"],
            "stopping: looks at single loads",
        ),
        (
            [SLO, "primary_metrics=[capacity_rate]", "capacity={}"],
            "has capacity_rate, and loads of arrival kind closed-loop do not grow with request_rate; set",
        ),
        (
            [SLO, AT_ONCE, "capacity={}", "workload.arrival={kind: burst}"],
            "has capacity_concurrency, and loads of arrival kind burst do not grow with max_concurrency; set",
        ),
        ("slo={ttft_ms: 0}", "slo.ttft_ms: is 0; it must be above 0"),
        ("slo={ttft_ms: 200, share: 1}", "slo.share: is 1; it must be at most 0.999"),
        ("slo={p99_ttft_ms: 200}", "slo.p99_ttft_ms: unknown key; did you mean 'ttft_ms'?"),
        (
            "primary_metrics=[tpot_ms, steady_goodput]",
            "primary_metrics: is tpot_ms, steady_goodput, and requests have no objective; set slo, such as",
        ),
    ],
    "topk-sweep": [
        # Assignments.
        ("workload.num_promts=3", "--set: workload.num_promts: unknown key; did you mean 'num_prompts'?"),
        ("workload.num_prompts=three", "--set: workload.num_prompts: expected a whole number, found 'three'"),
        ("seed.x=3", "--set: seed: expected a whole number, found a mapping"),
        ("sweep.top_k=[1, 1]", "--set: sweep.top_k: lists 1 twice; list each value once"),
        ("sweep=5", "--set: sweep: expected a mapping, found 5"),
        ("seed", "--set: 'seed' is not of the form path=value, for example workload.num_prompts=3"),
        ("a..b=3", "--set: 'a..b=3' is not of the form path=value"),
        ("seed=[1", "--set: seed: '[1' is not readable as a YAML value: while parsing a flow sequence, expected"),
        ("seed=!x 1", "--set: seed: the tag !x is not supported; write the plain value"),
        (
            "variants.guided.sampling.top_k=0.5x",
            "--set: ... guided.sampling.top_k: is ... sweep.top_k replaces it in every",
        ),
        # Ladders of controls.
        (("variants.guided-idle={}", GUIDED), "controls of 'guided' would make a variant of this name"),
        ("variants.baseline.controls=true", "the baseline has no steps to itself"),
        ("variants.guided.controls=3", "variants.guided.controls: expected true or false"),
        ("variants.guided.swept=[top_p]", "names 'top_p', which sweep does not have; it has top_k"),
        ("variants.guided.control={of: x, rung: middle}", "is 'middle'; allowed are flags, idle, neutral"),
    ],
    # An error of a variant is told once, and not for each of its steps.
    "controls": [("variants.guided.server.max_num_seqs=0", "--set: variants.guided.server.max_num_seqs: is 0")],
    "guided-idle on sim": [
        (
            ["request.extra_body={custom_params: {}}", "variants.idle={guidance: {}, sampling: {top_k: 5}}"],
            "custom_params carries the guidance of this variant",
        )
    ],
    "aa on sim": [("engine.python=/opt/a/bin/python", "python: unknown key")],
    "aa on vllm": [
        # What a request must not carry.
        ("request.extra_body={max_tokens: 3}", "max_tokens, which has a key of its own; set workload.output_len"),
        ("request.extra_body={ignore_eos: true}", "set stop instead"),
        ("request.extra_body={stream: false}", "sets stream, by which answers are timed and counted; remove it"),
        ("request.extra_body={temperature: 0}", "set sampling.temperature instead"),
        ("variants.again.request.extra_body={messages: []}", "set workload instead"),
        ("request.headers={Content-Type: text/plain}", "Content-Type is benchctl's own"),
        ("request.headers={X-Api-Key: abc}", "X-Api-Key may be a secret, ... write ${NAME} here"),
        ("request.headers={Cookie: session=sk-abc}", "Cookie may be a secret"),
        ("request.headers={X-Session-Id: sk-abc}", "X-Session-Id may be a secret"),
        ("variants.again.request.headers={Ocp-Apim-Subscription-Key: sk-abc}", "Subscription-Key may be a secret"),
        ("request.headers={X-Note: sk-abcdefghijklmnop}", "X-Note looks like a secret"),
        ("request.headers={X-Note: 'a ${b c}'}", "'${' that names no variable"),
        ("request.headers={'a b': c}", "'a b' is not the name of a header"),
        ("request.extra_body={api_key: abc}", "api_key, which looks like a secret"),
        ("sweep.request.extra_bodies.x=[1]", "no factor or setting has this name"),
        # Secrets.
        *(
            (assignment, f"{what} looks like a secret ... HF_TOKEN is taken from your env")
            for assignment, what in (
                ("engine.options.extra_args=[--api-key, opensesame]", "--api-key"),
                ("engine.options.extra_args=[--api-key=opensesame]", "--api-key"),
                (f"engine.options.extra_args=[--middleware, {KEY}]", "a token"),
                ("engine.options.env={HF_TOKEN: opensesame}", "HF_TOKEN"),
                (f"engine.options.env={{MIRROR: {KEY}}}", "MIRROR"),
                ("variants.again.server.extra_args=[--ssl-key-password, opensesame]", "--ssl-key-password"),
            )
        ),
    ],
    # What the engine does not have.
    "aa on transformers": [
        ("request.response_format={type: json_object}", "'transformers' have no response_format"),
        ("sampling.presence_penalty=0.5", "'transformers' have no presence_penalty"),
    ],
    "aa on llamacpp": [
        ("request.structured_outputs={regex: a}", "have choice, grammar, json ... , not regex"),
    ],
    "aa on attach": [
        (["engine.options.url=http://h:1", "engine.options.dialect=openai", assignment], message)
        for assignment, message in (
            ("variants.again.request.structured_outputs={json: {}}", "'openai' have none"),
            ("request.chat_template_kwargs={a: 1}", "'openai' pass nothing on to the chat template"),
        )
    ],
    # Variables that benchctl sets itself.
    **{
        f"topk-sweep on {engine}": [
            (
                f"{section}.env.{name}='1'",
                f"{section}.env.{name}: benchctl sets this variable itself ... {option}",
            )
            for section in ("engine.options", "variants.baseline.server")
            for name, option in options.items()
        ]
        for engine, options in {
            "vllm-lenvm": {
                "BENCHCTL_LENVM_CLOCK": "from engine.options.guidance_clock; set that and remove",
                "BENCHCTL_LENVM_SETTINGS": "from engine.options.value_dtype, engine.options.value_load_format",
                "BENCHCTL_LENVM_DESCRIPTION": "from engine.options.value_model; set that",
                "BENCHCTL_LENVM_STEP_LOG": "from engine.options.step_log; set that and remove",
            },
            "vllm": {"BENCHCTL_STEP_LOG": "from engine.options.step_log;", "BENCHCTL_LENVM_CLOCK": "; remove it"},
            "sglang": {"BENCHCTL_NOT_YET_KNOWN": "; remove it"},
        }.items()
    },
}


@pytest.mark.parametrize(
    ("where", "overrides", "message"),
    [(where, overrides, message) for where, rows in REFUSED.items() for overrides, message in rows],
)
def test_what_an_assignment_must_not_set_is_refused_in_one_line_and_no_secret_is_repeated(
    where: str, overrides: str | list[str], message: str
):
    """A message is its parts in their order."""
    name, _, engine = where.partition(" on ")
    with pytest.raises(ProfileError) as error:
        load_profile(
            name, engine=engine or None, overrides=[overrides] if isinstance(overrides, str) else overrides
        )
    rest = str(error.value)
    assert rest.startswith("--set: ")
    assert "\n" not in rest
    assert not any(secret in rest for secret in ("sk-abc", "opensesame", "hf_abc"))
    for part in message.split(" ... "):
        assert part in rest
        rest = rest.partition(part)[2]
