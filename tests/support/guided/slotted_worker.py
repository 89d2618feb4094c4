"""What a worker of vLLM's Model Runner V2 shows to its logits processors, in plain tensors, with names as there."""

from dataclasses import dataclass, field
from typing import Any

from support.guided.tensors import torch

from benchctl.guided.vllm.requests import Batch
from benchctl.guided.vllm.slots import Slots


@dataclass
class OnDevice:
    """Numbers that the device writes."""

    gpu: Any


@dataclass
class OnHost:
    """Numbers that the host writes and the device sees."""

    np: Any


@dataclass
class States:
    """As ``LogitsProcRequestState``."""

    device: Any
    max_num_reqs: int
    vocab_size: int
    all_token_ids: OnDevice
    prompt_len: OnHost
    prefill_len: OnHost
    total_len: OnDevice


@dataclass
class Context:
    """As ``LogitsContext``."""

    expanded_idx_mapping: Any
    idx_mapping: Any
    idx_mapping_np: Any
    expanded_local_pos: Any
    input_ids: Any
    pos: Any
    seq_lens_upper_bound_np: Any


def states(slots: int, longest: int, device: str = "cpu") -> States:
    """With rubbish in what was never written."""
    return States(
        device=torch.device(device),
        max_num_reqs=slots,
        vocab_size=512,
        all_token_ids=OnDevice(torch.full((slots, longest), -7, dtype=torch.int32, device=device)),
        prompt_len=OnHost(torch.zeros(slots, dtype=torch.int32).numpy()),
        prefill_len=OnHost(torch.zeros(slots, dtype=torch.int32).numpy()),
        total_len=OnDevice(torch.zeros(slots, dtype=torch.int32, device=device)),
    )


def context(slots: list[int], lengths: list[int], *, rows_per_request: int = 1) -> Context:
    """One step; the array of lengths is longer than the batch, as where a graph wants more rows."""
    expanded = torch.tensor(slots).repeat_interleave(rows_per_request)
    return Context(
        expanded_idx_mapping=expanded,
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=torch.tensor(slots).numpy(),
        expanded_local_pos=torch.zeros_like(expanded),
        input_ids=torch.zeros_like(expanded),
        pos=torch.tensor(lengths).repeat_interleave(rows_per_request) - 1,
        seq_lens_upper_bound_np=torch.tensor([*lengths, 0, 0], dtype=torch.int32).numpy(),
    )


@dataclass
class Worker:
    """Keeps slots as V2 does: freed ones are taken again, the last first, and nobody is told that they are free."""

    states: States
    slots: Slots = field(init=False)
    computed: dict[int, int] = field(default_factory=dict)
    """Tokens of which the model knows the keys, of each slot in use."""

    def __post_init__(self) -> None:
        self.slots = Slots(self.states)
        self._free = list(range(self.states.max_num_reqs))

    def add(self, asked: Any, prompt: list[int], output: list[int] | None = None) -> tuple[int, int | None]:
        """The slot of a request, and the key of the guided one that had it before."""
        slot, tokens = self._free.pop(), [*prompt, *(output or [])]
        self.states.prompt_len.np[slot], self.states.prefill_len.np[slot] = len(prompt), len(tokens)
        self.states.total_len.gpu[slot] = len(tokens)
        self.states.all_token_ids.gpu[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.computed[slot] = 0
        return slot, self.slots.add(slot, asked)

    def remove(self, slot: int) -> None:
        del self.computed[slot]
        self._free.append(slot)

    def forward(self, order: list[int], chunk: int = 1000) -> Context:
        """Compute what is missing of these slots, at most ``chunk`` tokens of each."""
        for slot in order:
            self.computed[slot] = min(int(self.states.total_len.gpu[slot]), self.computed[slot] + chunk)
        return context(order, [self.computed[slot] for slot in order])

    def step(self, order: list[int], drawn: dict[int, int], chunk: int = 1000) -> Batch:
        """One step as the processor lives it: tokens are asked for, logits are there, a token of each is drawn."""
        self.slots.ask_for_tokens()
        said = self.forward(order, chunk)
        batch = self.slots.batch(said)
        for slot in order:
            length = int(self.states.total_len.gpu[slot])
            if self.computed[slot] == length:
                self.states.all_token_ids.gpu[slot, length] = drawn[slot]
                self.states.total_len.gpu[slot] += 1
        return batch
