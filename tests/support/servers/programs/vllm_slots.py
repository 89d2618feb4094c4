"""Runs in vLLM's own environment: the slots of its Model Runner V2 with our processor, on logits that never change.

Reads one JSON object from standard input: ``logits`` [V], ``requests`` (the sampling parameters of each, with
``extra_args``), ``draws`` (steps of one token each), ``eos`` and ``value_model``. In each step half of the requests
are preempted and come back with what they had, so that slots and rows change owners. Writes for each request the
tokens that were drawn, or why it was refused. Where there is Triton, which V2 needs, its own sampler draws;
where there is none, processors are asked here as that sampler asks them, and plain torch does what comes after.
"""

import json
import os
import sys
from pathlib import Path

ASKED = json.load(sys.stdin)
os.environ["BENCHCTL_LENVM_MODEL"] = ASKED["value_model"]
sys.path.insert(0, str(Path(__file__).parents[4] / "benchctl" / "engines" / "inside" / "vllm"))

import torch  # noqa: E402

IS_CUDA = torch.cuda.is_available()
if not IS_CUDA:
    import vllm.v1.worker.cpu.shm  # noqa: F401 - as the worker does: memory without pins

import numpy as np  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.triton_utils import HAS_TRITON  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor.loader import (  # noqa: E402
    build_custom_logits_processors,
    build_custom_logits_processors_params_validator,
)
from vllm.v1.worker.gpu.sample.sampler import Sampler  # noqa: E402
from vllm.v1.worker.gpu.states import RequestState  # noqa: E402
from vllm_worker import PROCESSORS, worker_configuration  # noqa: E402

NUM_TOKENS = 80
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")


class TorchSampler:
    """What follows V2's processors, for rows of one token each."""

    def __init__(self, processors):
        self._processors, self._asked, self._generators = processors, {}, {}

    def add_request(self, slot, params):
        self._asked[slot] = params
        for processor in self._processors:
            processor.add_request(slot, params)

    def apply_staged_writes(self):
        for processor in self._processors:
            processor.apply_staged_writes()

    def sample(self, logits, context, names):
        for processor in self._processors:
            logits = processor.apply(logits, context)
        return [
            self._draw(logits[row], self._asked[slot], names[row])
            for row, slot in enumerate(context.idx_mapping_np)
        ]

    def _draw(self, logits, params, name):
        if params.temperature == 0:
            return int(logits.argmax())
        limits = [torch.tensor([limit]) for limit in (params.top_k or len(logits), params.top_p)]
        logits = apply_top_k_top_p((logits / params.temperature)[None], *limits)
        chances = torch.softmax(logits[0], dim=0)
        chances[chances < params.min_p * chances.max()] = 0
        generator = self._generators.setdefault(
            name, torch.Generator().manual_seed(params.seed or 100 + int(name[1:]))
        )
        return int(torch.multinomial(chances, 1, generator=generator))


class OwnSampler:
    """V2's."""

    def __init__(self, config, states, processors):
        self._sampler = Sampler(
            config, states.max_num_reqs, states.vocab_size, DEVICE, states, custom_logits_processors=processors
        )
        self.add_request, self.apply_staged_writes = self._sampler.add_request, self._sampler.apply_staged_writes

    def sample(self, logits, context, _names):
        tokens, _ = self._sampler.sample(
            logits, context.expanded_idx_mapping, context.idx_mapping, context.idx_mapping_np, context.pos,
            context.input_ids, context.expanded_local_pos, context.seq_lens_upper_bound_np,
        )  # fmt: skip
        return tokens.tolist()


class Batch:
    """Requests in their slots."""

    def __init__(self, logits, requests):
        self._logits, self._requests = logits, requests
        self._states = RequestState(
            max_num_reqs=len(requests), max_model_len=NUM_TOKENS, max_num_batched_tokens=64,
            num_speculative_steps=0, vocab_size=len(logits), device=DEVICE,
        )  # fmt: skip
        config = worker_configuration(
            vocabulary=len(logits),
            num_tokens=NUM_TOKENS,
            max_num_seqs=len(requests),
            eos=ASKED["eos"],
            scheduler={"async_scheduling": True, "max_num_batched_tokens": 64},
            reasoning_config=None,
            num_speculative_tokens=0,
        )
        processors = build_custom_logits_processors(config, self._states, False, PROCESSORS)
        is_own = HAS_TRITON
        self._sampler = OwnSampler(config, self._states, processors) if is_own else TorchSampler(processors)
        self._tokens = {name: [5, 6, 7 + number] for number, name in enumerate(requests)}

    def fill(self):
        """Give a slot to each request that has none."""
        for name, params in self._requests.items():
            if name in self._states.req_id_to_index:
                continue
            tokens = self._tokens[name]
            self._states.add_request(name, 3, tokens, 0, NUM_TOKENS - 3)
            slot = self._states.req_id_to_index[name]
            self._sampler.add_request(slot, params)
            if not HAS_TRITON:
                self._states.all_token_ids.gpu[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        if HAS_TRITON:
            self._states.apply_staged_writes()
        self._sampler.apply_staged_writes()

    def empty(self, names):
        for name in names:
            self._states.remove_request(name)

    def step(self, names):
        """A token of each request."""
        slots = np.array([self._states.req_id_to_index[name] for name in names], dtype=np.intp)
        lengths = np.array([len(self._tokens[name]) for name in names], dtype=np.int32)
        rows = torch.from_numpy(slots).to(DEVICE, torch.int32)
        context = LogitsContext(
            expanded_idx_mapping=rows,
            idx_mapping=rows,
            idx_mapping_np=slots,
            expanded_local_pos=torch.zeros_like(rows),
            input_ids=torch.tensor([self._tokens[name][-1] for name in names], device=DEVICE),
            pos=torch.from_numpy(lengths.astype(np.int64) - 1).to(DEVICE),
            seq_lens_upper_bound_np=lengths,
        )
        tokens = self._sampler.sample(self._logits.to(DEVICE).repeat(len(names), 1), context, names)
        for name, slot, token in zip(names, slots, tokens, strict=True):
            self._states.all_token_ids.gpu[slot, len(self._tokens[name])] = token
            self._tokens[name].append(token)

    def drawn(self, name):
        return self._tokens[name][3:]


def admitted(validate, said):
    """Parameters as vLLM lets them in; a text where they are refused."""
    params = SamplingParams(**said)
    try:
        validate(params)
    except VLLMValidationError as error:
        return str(error)
    return params


def main():
    validate = build_custom_logits_processors_params_validator(PROCESSORS)
    asked = {f"r{number}": admitted(validate, said) for number, said in enumerate(ASKED["requests"])}
    living = {name: params for name, params in asked.items() if not isinstance(params, str)}
    batch = Batch(torch.tensor(ASKED["logits"]), living)
    order = list(living)
    for step in range(ASKED["draws"]):
        batch.fill()
        order = order[7:] + order[:7]  # another order in each step
        batch.step(order)
        batch.empty([name for name in living if (int(name[1:]) + step) % 2 == 0])
    json.dump([said if isinstance(said, str) else batch.drawn(name) for name, said in asked.items()], sys.stdout)


main()
