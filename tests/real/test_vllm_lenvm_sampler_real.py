"""What is drawn where guidance is a processor of vLLM's model runners: in vLLM's environment, without a server."""

import json
import math
import subprocess
from collections import Counter

import pytest
from scipy.stats import chisquare
from support.guided.tensors import torch  # noqa: F401 - skips these tests where there is none
from support.guided.value_models import write_pair
from support.servers.real_engines import needs

from benchctl.engines.environment import engines_directory

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.slow,
    needs("vllm"),
]

SCRIPTS = {
    "v1": "tests/support/servers/programs/vllm_sampler.py",
    "v2": "tests/support/servers/programs/vllm_slots.py",
}
VOCABULARY, EOS, VALUE = 512, 2, 0.75
TEMPERATURE, TOP_K, TOP_P, MIN_P, SCALE = 0.7, 6, 0.9, 0.05, -2.0
LOGITS = [3.0 - 0.4 * rank for rank in range(12)] + [-5.0] * (VOCABULARY - 12)
DRAWS, ROWS = 60, 16
TILT = {"lenvm_mode": "centered_exp", "lenvm_value_scale": SCALE}
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


@pytest.fixture(name="drawn", scope="module", params=[pytest.param("v1", marks=pytest.mark.nightly), "v2"])
def _drawn(request, tmp_path_factory):
    pair = write_pair(tmp_path_factory.mktemp("pair"), constant=VALUE)
    requests = [FILTERS | {"extra_args": dict(TILT), "max_tokens": 5} for _ in range(ROWS)]
    requests += [{"temperature": 1.0, "top_k": 3, "seed": 5} for _ in range(4)]
    requests += [{"temperature": 0.0, "extra_args": dict(TILT)}]
    requests += [{"top_k": 5, "extra_args": {"lenvm_value_scale": "much"}}, {"extra_args": dict(TILT)}]
    neutral = {"lenvm_mode": "centered_exp", "lenvm_value_scale": 0.0}
    for skips in (0, 1):
        requests.append({"top_k": 5, "seed": 9, "extra_args": neutral | {"lenvm_skip_noop": skips}})
    requests.append({"top_k": 5, "seed": 9})
    asked = {"logits": LOGITS, "requests": requests, "draws": DRAWS, "value_model": str(pair / "value"), "eos": EOS}
    done = subprocess.run(
        [engines_directory() / "vllm" / "bin" / "python", SCRIPTS[request.param]],
        input=json.dumps(asked), capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


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
