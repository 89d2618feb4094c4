"""Runs in vLLM's own environment: its batch and its sampler with our processor, on logits that never change.

Reads one JSON object from standard input: ``logits`` [V], ``requests`` (the sampling parameters of each, with
``extra_args``), ``draws`` (steps of one token each), ``eos`` and ``value_model``. In each step half of the requests
leave and come back, so that rows change places. Writes for each request the tokens that were drawn, or why it was
refused.
"""

import json
import os
import sys
from pathlib import Path

ASKED = json.load(sys.stdin)
os.environ["BENCHCTL_LENVM_MODEL"] = ASKED["value_model"]
sys.path.insert(0, str(Path(__file__).parents[4] / "benchctl" / "engines" / "inside" / "vllm"))

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.v1.sample.logits_processor import build_logitsprocs, validate_logits_processors_parameters  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch  # noqa: E402
from vllm_worker import PROCESSORS, worker_configuration  # noqa: E402

NUM_TOKENS = 64
CPU = torch.device("cpu")


def admitted(number, said):
    """A request as vLLM lets it into the batch; a text where it is refused."""
    params = SamplingParams(**said)
    try:
        validate_logits_processors_parameters(PROCESSORS, params)
    except VLLMValidationError as error:
        return str(error)
    seed = said.get("seed")
    return CachedRequestState(
        req_id=f"r{number}",
        prompt_token_ids=[5, 6, 7 + number],
        mm_features=[],
        sampling_params=params,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
        block_ids=([0],),
        num_computed_tokens=0,
        output_token_ids=[],
    )


def main():
    logits = torch.tensor(ASKED["logits"])
    states = [admitted(number, said) for number, said in enumerate(ASKED["requests"])]
    living = [state for state in states if not isinstance(state, str)]
    size = len(living)
    config = worker_configuration(
        vocabulary=len(logits), num_tokens=NUM_TOKENS, max_num_seqs=size, eos=ASKED["eos"]
    )
    batch = InputBatch(
        max_num_reqs=size, max_model_len=NUM_TOKENS, max_num_batched_tokens=NUM_TOKENS, device=CPU,
        vocab_size=len(logits), block_sizes=[16], max_num_blocks_per_req=[4],
        logitsprocs=build_logitsprocs(config, CPU, False, False, PROCESSORS),
    )  # fmt: skip
    sampler, drawn = Sampler(), {state.req_id: [] for state in living}
    for step in range(ASKED["draws"]):
        for state in living:
            is_leaving = (int(state.req_id[1:]) + step) % 2 == 0
            if is_leaving and batch.remove_request(state.req_id) is not None:
                state.output_token_ids = []  # the next draw is from the same distribution
        for state in living:
            if state.req_id not in batch.req_id_to_index:
                batch.add_request(state)
        batch.condense()
        batch.refresh_metadata()
        tokens = sampler(logits.repeat(size, 1), batch.sampling_metadata).sampled_token_ids[:, 0].tolist()
        for row, name in enumerate(batch.req_ids):
            drawn[name].append(tokens[row])
    json.dump([state if isinstance(state, str) else drawn[state.req_id] for state in states], sys.stdout)


main()
