"""Guidance in a real vLLM, asked over HTTP and in its sampler: what must come out can be computed beforehand."""

import json
import math
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from operator import itemgetter
from statistics import fmean

import pytest
from scipy.stats import chisquare
from support.engine_settings import settings_of
from support.guided.known_pairs import PROMPT, SHARES, length_law, write_known_pair
from support.servers.real_engines import SMALL, needs, served

from benchctl.engines.environment import engines_directory
from benchctl.engines.tiny_models.make import make_value_pair
from benchctl.engines.vllm_lenvm.engine import VllmLenvmEngine

pytestmark = [pytest.mark.real_engine, pytest.mark.slow, needs("vllm")]

ENGINE = VllmLenvmEngine()
LONGEST = 150
NUM_SEQS = 32
NUM_KEPT, NUM_ASKED = 17, 24
"""The longest answers that the cache holds, and so many that some must go."""
TILT = {"lenvm_mode": "centered_exp"}


BLOCK_BYTES = 128 * 2 * 2 * 32 * 4
"""A block of vLLM's cache on a CPU: 128 tokens of the known base model, in float32."""
SWITCHES = {
    "on": {},
    "off": {"fused": False, "value_graphs": False, "value_kernels": False, "value_skips_early": False},
}


class Guided:
    """A server, asked for answers to the one prompt; and what its log says of its steps."""

    def __init__(self, client, directory):
        self.client, self.directory = client, directory
        self.model = client.get("/v1/models").json()["data"][0]["id"]

    def ask(self, guidance=None, **told):
        body = {
            "model": self.model, "prompt": PROMPT, "max_tokens": LONGEST, "temperature": 1.0, "top_k": 5,
            "seed": 1, "return_token_ids": True, **told,
        }  # fmt: skip
        if guidance is not None:
            body["vllm_xargs"] = guidance
        return self.client.post("/v1/completions", json=body)

    def tokens(self, guidance=None, **told):
        (tokens,) = self.samples(1, guidance, **told)
        return tokens

    def samples(self, number, guidance, **told):
        """Tokens of ``number`` answers to one request, computed side by side however busy the machine is.

        Answer i is drawn with the seed of the request plus i.
        """
        answer = self.ask(guidance, n=number, **told)
        assert answer.status_code == 200, answer.text
        choices = [choice["token_ids"] for choice in sorted(answer.json()["choices"], key=itemgetter("index"))]
        assert answer.json()["usage"]["completion_tokens"] == sum(map(len, choices))
        return choices

    def all_tokens(self, requests):
        """Of requests that are sent at once."""
        with ThreadPoolExecutor(NUM_SEQS) as pool:
            return list(pool.map(lambda request: self.tokens(request.get("guidance"), **request["told"]), requests))

    def steps(self):
        return [json.loads(line) for line in (self.directory / "steps.guided.jsonl").read_text().splitlines()]

    def num_preempted(self):
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total"))


@pytest.fixture(name="guided", scope="module", params=["on", pytest.param("off", marks=pytest.mark.nightly)])
def _guided(request, tmp_path_factory):
    """A guiding server of the known pair, whose cache holds 17 of the longest answers."""
    directory = tmp_path_factory.mktemp("guided")
    pair = write_known_pair(directory / "pair")
    settings = settings_of(
        "vllm-lenvm", pair / "base", value_model=str(pair / "value"), dtype="float32", enforce_eager=True,
        max_num_seqs=NUM_SEQS, max_model_len=256, enable_chunked_prefill=False,
        kv_cache_memory_bytes=2 * NUM_KEPT * BLOCK_BYTES, **SWITCHES[request.param],
    )  # fmt: skip
    with served(ENGINE, settings, directory) as client:
        guided = Guided(client, directory)
        guided.is_on = request.param == "on"
        yield guided


def fits(lengths, law):
    """The chance of lengths as odd as these under ``law``; rare ones are put together."""
    expected, observed, bins = [], [], Counter(lengths)
    for length, chance in enumerate(law, 1):
        if not expected or expected[-1] >= 8:
            expected.append(0.0)
            observed.append(0)
        expected[-1] += chance * len(lengths)
        observed[-1] += bins[length]
    if expected[-1] < 5:
        last, seen = expected.pop(), observed.pop()
        expected[-1] += last
        observed[-1] += seen
    return chisquare(observed, expected).pvalue


def test_answers_are_as_long_as_the_value_of_each_place_and_the_scale_make_them(guided):
    means = {}
    for scale in (-3.0, 0.0, 2.0):
        asked = [{"guidance": TILT | {"lenvm_value_scale": scale}, "told": {"seed": i}} for i in range(100)]
        lengths = [len(tokens) for tokens in guided.all_tokens(asked)]
        law = length_law(scale, LONGEST)
        assert fits(lengths, law) > 1e-4, (scale, sorted(lengths))
        means[scale] = fmean(lengths)
    assert fits(lengths, length_law(0.0, LONGEST)) < 1e-6, "so many answers do not tell the laws apart"
    assert means[-3.0] < means[0.0] / 4
    assert means[2.0] > means[0.0] * 2


def test_neutral_guidance_gives_the_tokens_of_no_guidance_whether_it_is_computed_or_not(guided):
    neutral = TILT | {"lenvm_value_scale": 0.0}
    for seed in range(3):
        before = len(guided.steps())
        plain = guided.tokens(seed=seed)
        skipped = guided.tokens(neutral | {"lenvm_skip_noop": 1}, seed=seed)
        assert len(guided.steps()) == before, "what changes nothing was computed"
        computed = guided.tokens(neutral | {"lenvm_skip_noop": 0}, seed=seed)
        assert plain == skipped == computed
        priced = [step["candidates"] for step in guided.steps()[before:] if step["sections_ns"]["lvm_forward"] > 0]
        assert priced == [5] * len(computed)


def test_what_cannot_be_is_refused_for_that_request_and_the_server_lives_on(guided):
    for guidance, told, said in (
        ({"lenvm_value_scale": "much"}, {}, "value_scale is 'much'"),
        (TILT, {"top_k": -1}, "set top_k to 2 or more"),
    ):
        answer = guided.ask(guidance, **told)
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
    assert guided.tokens(TILT | {"lenvm_value_scale": -3.0})


def test_requests_in_one_batch_are_each_guided_as_they_ask(guided):
    greedy = {"guidance": TILT | {"lenvm_value_scale": -3.0}, "told": {"temperature": 0.0, "max_tokens": 8}}
    modes = [
        TILT | {"lenvm_value_scale": -3.0},
        TILT | {"lenvm_value_scale": 2.0},
        {"lenvm_mode": "exp", "lenvm_value_scale": -3.0},
        {"lenvm_mode": "linear", "lenvm_value_scale": -0.5},
        None,
    ]
    asked = [{"guidance": mode, "told": {"seed": seed}} for seed in range(3) for mode in modes]
    alone = [guided.tokens(request["guidance"], **request["told"]) for request in asked]
    likeliest = max(SHARES, key=lambda token: SHARES[token])
    for _ in range(10):  # who is in a batch with whom is a matter of when requests come
        before = len(guided.steps())
        with ThreadPoolExecutor() as pool:
            for mode in modes[1:]:  # long enough for others to come beside them
                pool.submit(guided.samples, 6, mode, seed=99, ignore_eos=True)
            together = guided.all_tokens([*asked, greedy, greedy])
        assert together[:-2] == alone
        assert together[-2:] == [[likeliest] * 8] * 2
        if any(0 < step["guided_rows"] < step["num_seqs"] for step in guided.steps()[before:]):
            break
    else:
        pytest.fail("no batch was mixed")
    assert len({tuple(tokens) for tokens in together[: len(modes)]}) > 2


def test_in_steady_decode_every_step_is_one_forward_of_the_value_model(guided):
    before = len(guided.steps())
    guided.samples(16, TILT | {"lenvm_value_scale": 2.0}, ignore_eos=True)
    steps = guided.steps()[before:]
    steady = [
        step
        for was, step in pairwise(steps)
        if was["num_seqs"] == step["num_seqs"] > 1 and not step["value_prefill_tokens"]
    ]
    assert len(steady) > LONGEST / 2
    assert {step["fused"] for step in steady} == {guided.is_on}
    # Either the token that was drawn is taken over from its step, or it goes through the value model again.
    done, left = ("value_reuse_tokens", "value_extend_tokens")[:: 1 if guided.is_on else -1]
    assert all((step[done], step[left]) == (step["num_seqs"], 0) for step in steady)
    joined = {step.step: step for step in ENGINE.read_steps(guided.directory)}
    for step in steady:
        of_server = joined[step["step"]]
        assert (of_server.guided_rows, of_server.candidates) == (step["num_seqs"], 5 * step["num_seqs"])
        assert of_server.output_tokens == of_server.num_seqs == step["num_seqs"]
        sections = of_server.sections_ns
        assert 0 < sections["lvm_forward"] <= sections["lvm_apply_outer"] <= sections["sampler_total"]
        assert sections["sampler_total"] <= of_server.dur_ns


def test_requests_that_are_preempted_and_computed_again_get_the_tokens_that_they_get_alone(guided):
    guidance, before = TILT | {"lenvm_value_scale": 2.0}, guided.num_preempted()
    together = guided.samples(NUM_ASKED, guidance, seed=0, ignore_eos=True)
    assert guided.num_preempted() > before, "the cache held all of them"
    for seed in (5, 11, NUM_KEPT, 20, NUM_ASKED - 1):  # the last to come are the first to go
        assert together[seed] == guided.tokens(guidance, seed=seed, ignore_eos=True)


EOS, VALUE = 2, 0.75
TEMPERATURE, TOP_K, TOP_P, MIN_P, SCALE = 0.7, 6, 0.9, 0.05, -2.0
LOGITS = [3.0 - 0.4 * rank for rank in range(12)] + [-5.0] * (SMALL.shape.vocab - 12)
DRAWS, ROWS = 60, 16
DOWN = TILT | {"lenvm_value_scale": SCALE}
SLOTS = "tests/support/servers/programs/vllm_slots.py"
FILTERS = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P}


def expected(scale):
    """The guided distribution, in plain Python: temperature, top_k, top_p, min_p, and then the tilt."""
    weights = [math.exp(logit / TEMPERATURE) for logit in LOGITS]
    probabilities, kept, before = [weight / sum(weights) for weight in weights], {}, 0.0
    for token in range(TOP_K):
        if before <= TOP_P and probabilities[token] >= MIN_P * probabilities[0]:
            kept[token] = probabilities[token] * math.exp(scale * (0 if token == EOS else VALUE))
        before += probabilities[token]
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


@pytest.fixture(name="drawn", scope="module")
def _drawn(tmp_path_factory):
    """What the sampler of vLLM's second model runner draws with our processor, without a server."""
    pair = tmp_path_factory.mktemp("pair")
    make_value_pair(pair, SMALL, SMALL, constant=VALUE)
    requests = [FILTERS | {"extra_args": DOWN, "max_tokens": 5} for _ in range(ROWS)]
    requests += [{"temperature": 1.0, "top_k": 3, "seed": 5} for _ in range(4)]
    requests += [{"temperature": 0.0, "extra_args": DOWN}]
    requests += [{"top_k": 5, "extra_args": {"lenvm_value_scale": "much"}}, {"extra_args": DOWN}]
    neutral = TILT | {"lenvm_value_scale": 0.0}
    for extra_args in (neutral | {"lenvm_skip_noop": 0}, neutral | {"lenvm_skip_noop": 1}, {}):
        requests.append({"top_k": 5, "seed": 9, "extra_args": extra_args})
    asked = {"logits": LOGITS, "requests": requests, "draws": DRAWS, "value_model": str(pair / "value"), "eos": EOS}
    done = subprocess.run(
        [engines_directory() / "vllm" / "bin" / "python", SLOTS],
        input=json.dumps(asked), capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly  # of the model runner that servers use where they are told to
def test_tokens_are_drawn_from_the_guided_distribution_itself(drawn):
    seen = Counter(token for row in drawn[:ROWS] for token in row)
    law = expected(SCALE)
    assert set(seen) <= set(law)
    total = sum(seen.values())
    assert total == ROWS * DRAWS
    observed, wanted = zip(*((seen[token], total * share) for token, share in law.items()), strict=True)
    assert chisquare(observed, wanted).pvalue > 1e-4
    untilted = [total * share for share in expected(0.0).values()]
    assert chisquare(observed, untilted).pvalue < 1e-6, "so many draws do not tell the two laws apart"


@pytest.mark.nightly
def test_filters_cut_once_unguided_requests_are_sampled_as_ever_and_what_does_not_exist_is_refused(drawn):
    # The tilt makes the last candidate of top_p more likely than the filter would leave it.
    assert max(expected(SCALE)) in {token for row in drawn[:ROWS] for token in row}
    assert {token for row in drawn[ROWS : ROWS + 4] for token in row} <= {0, 1, 2}
    assert drawn[ROWS + 4] == [0] * DRAWS
    assert "value_scale is 'much'" in drawn[ROWS + 5]
    assert "top_k is 0" in drawn[ROWS + 6]
    computed, skipped, unguided = drawn[-3:]  # neutral guidance draws what the unguided request draws with its seed
    assert computed == skipped == unguided
    assert len(set(unguided)) > 1
