"""What a worker of vLLM's Model Runner V2 shows to its logits processors, in plain tensors, with names as there."""

from types import SimpleNamespace
from typing import Any

from support.guided.tensors import torch

from benchctl.guided.vllm.requests import Batch
from benchctl.guided.vllm.slots import Slots


def context(slots: list[int], lengths: list[int], *, rows_per_request: int = 1) -> SimpleNamespace:
    """One step, as ``LogitsContext``; the lengths are more than the batch has, as where a graph wants more rows."""
    expanded = torch.tensor(slots).repeat_interleave(rows_per_request)
    return SimpleNamespace(
        expanded_idx_mapping=expanded,
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=torch.tensor(slots).numpy(),
        expanded_local_pos=torch.zeros_like(expanded),
        input_ids=torch.zeros_like(expanded),
        pos=torch.tensor(lengths).repeat_interleave(rows_per_request) - 1,
        seq_lens_upper_bound_np=torch.tensor([*lengths, 0, 0], dtype=torch.int32).numpy(),
    )


class Worker:
    """Keeps slots as V2 does: freed ones are taken again, the last first, and nobody is told that they are free."""

    def __init__(self, slots: int = 4, longest: int = 64) -> None:
        zeros = torch.zeros(3, slots, dtype=torch.int32)
        # As ``LogitsProcRequestState``, with rubbish in what was never written.
        self.states = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_reqs=slots,
            vocab_size=512,
            all_token_ids=SimpleNamespace(gpu=torch.full((slots, longest), -7, dtype=torch.int32)),
            prompt_len=SimpleNamespace(np=zeros[0].numpy()),
            prefill_len=SimpleNamespace(np=zeros[1].numpy()),
            total_len=SimpleNamespace(gpu=zeros[2]),
        )
        self.slots = Slots(self.states)
        self.computed: dict[int, int] = {}
        """Tokens of which the model knows the keys, of each slot in use."""
        self._free = list(range(slots))

    def add(self, asked: Any, prompt: list[int], output: list[int] | None = None) -> int:
        """The slot of a request."""
        slot, tokens = self._free.pop(), [*prompt, *(output or [])]
        self.states.prompt_len.np[slot], self.states.prefill_len.np[slot] = len(prompt), len(tokens)
        self.states.total_len.gpu[slot] = len(tokens)
        self.states.all_token_ids.gpu[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.computed[slot] = 0
        self.slots.add(slot, asked)
        return slot

    def remove(self, slot: int) -> None:
        del self.computed[slot]
        self._free.append(slot)

    def forward(self, order: list[int], chunk: int = 1000) -> SimpleNamespace:
        """Compute what is missing of these slots, at most ``chunk`` tokens of each."""
        for slot in order:
            self.computed[slot] = min(int(self.states.total_len.gpu[slot]), self.computed[slot] + chunk)
        return context(order, [self.computed[slot] for slot in order])

    def step(self, order: list[int], drawn: dict[int, int], chunk: int = 1000) -> Batch:
        """One step as the processor lives it: tokens are asked for, logits are there, a token of each is drawn."""
        self.slots.ask_for_tokens()
        batch = self.slots.batch(self.forward(order, chunk))
        for slot in order:
            length = int(self.states.total_len.gpu[slot])
            if self.computed[slot] == length:
                self.states.all_token_ids.gpu[slot, length] = drawn[slot]
                self.states.total_len.gpu[slot] += 1
        return batch
