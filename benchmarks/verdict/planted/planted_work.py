"""A logits processor of vLLM that changes no token and works longer in every step: a change of known size.

It runs in the process of the engine, which imports it by ``--logits-processors planted_work:PlantedWork`` with this
folder on ``PYTHONPATH``. Work, not waiting, so that a slow moment of the machine slows it like everything else.
"""

import os
from pathlib import Path

import torch
from vllm.v1.sample.logits_processor.interface import LogitsProcessor


class PlantedWork(LogitsProcessor):
    """Sorts a few numbers ``PLANTED_ROUNDS`` times in each step; that may be a file that holds the number now."""

    def __init__(self, vllm_config, device, is_pin_memory):  # noqa: ARG002 - called so by vLLM
        self.rounds = os.environ.get("PLANTED_ROUNDS", "0")
        self.numbers = torch.rand(256, device=device)

    def apply(self, logits):
        rounds = self.rounds if self.rounds.isdigit() else Path(self.rounds).read_text()
        for _ in range(int(rounds)):
            torch.sort(self.numbers)
        return logits

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        """It needs to know nothing of the requests."""
