"""SGLang itself, started and measured through the command line, with a model of random weights.

SGLang has no packages for machines without a GPU; an environment that was put together by hand serves there too.
"""

import shutil

import pytest
from support.servers.real_engines import assert_accounts_agree, needs, smoked

pytestmark = [pytest.mark.real_engine, pytest.mark.slow, needs("sglang")]

ON_A_CPU = [
    "engine.options.device=cpu",
    "engine.options.attention_backend=torch_native",
    "engine.options.mem_fraction_static=0.1",
    'engine.options.env.OMP_NUM_THREADS="1"',
]


def test_every_account_of_every_run_agrees_and_no_more_differs_than_was_declared(tmp_path):
    on_this_machine = [] if shutil.which("nvidia-smi") else ON_A_CPU
    results = smoked("sglang", "sglang", tmp_path, "engine.options.overlap_schedule=false", *on_this_machine)
    assert_accounts_agree(results, {"client-tokens", "step-tokens", "counters", "prefix-cache", "step-time"})
    baseline, cell = (run.record.effective_config for run in results.runs)
    assert baseline["server.enable_prefix_caching"] is baseline["server.overlap_schedule"] is False
    assert {key for key in baseline.keys() | cell.keys() if baseline.get(key) != cell.get(key)} == {
        "sampling.top_k"
    }
