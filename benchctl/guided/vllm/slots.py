"""The guided rows of a batch of vLLM's Model Runner V2, and the tokens of their requests, on the host.

V2 keeps a slot for each request of its batch. It reports the request that enters a slot, never the one that
left it; the order of rows changes in each step; and the tokens of all requests are in one tensor that the device
writes. Guidance needs them on the host. A sequence changes only at its end, so each step copies the new tokens: one
gather for all requests together, and one copy.

The copy is launched before the model of the step and after the sampling of the previous step, whose tokens it
needs. Waiting for it, once the logits exist, means waiting for that sampling and not for the model. This is the
price of V2 for guidance, once in each step: the host cannot run further ahead than the model that it has launched.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, TypeAlias

import torch

from benchctl.guided.operations import Arriving
from benchctl.guided.params import GuidanceError
from benchctl.guided.rows import GuideRow
from benchctl.guided.vllm.requests import Batch, guided_request


@dataclass(slots=True)
class _Held:
    """A guided request in its slot."""

    row: GuideRow
    tokens: list[int]
    """Those that are on the host; the row's own."""
    num_on_device: int
    """Tokens that the device has once all that was launched is done."""


_NewTokens: TypeAlias = tuple[Arriving, list[tuple[list[int], int]]]
"""Tokens on their way to the host, and the sequences that they belong to, with the number of each."""


def check_v2(vllm_config: Any) -> None:
    """Raises GuidanceError for what a server of V2 may do and guidance cannot follow."""
    if vllm_config.speculative_config is not None:
        raise GuidanceError(
            "a value model guides one token of a sequence in each step, and speculative decoding samples several; "
            "start the server without --speculative-config"
        )
    if getattr(vllm_config.model_config, "enable_prompt_embeds", False):
        raise GuidanceError(
            "Model Runner V2 does not say which prompts are embeddings, which a value model cannot read; start the "
            "server without --enable-prompt-embeds, or with VLLM_USE_V2_MODEL_RUNNER=0"
        )


class Slots:
    """Follows the slots of one V2 worker."""

    def __init__(self, states: Any) -> None:
        """``states`` is V2's ``RequestState``, current at any time.

        Of it ``all_token_ids.gpu`` [slots, most tokens] are read, of which what lies beyond a sequence's end means
        nothing, and ``prompt_len.np`` and ``prefill_len.np`` [slots]: the tokens that a request came with are its
        prompt, and its output so far where it had been preempted.
        """
        self._states = states
        self._by_slot: dict[int, _Held] = {}
        self._numbers = count()
        self._arriving: _NewTokens | None = None

    def __bool__(self) -> bool:
        return bool(self._by_slot)

    def add(self, slot: int, sampling: Any) -> int | None:
        """A request comes into a slot; the key of the guided one that had it before."""
        before = self._by_slot.pop(slot, None)
        request = guided_request(sampling)
        if request is not None:
            tokens: list[int] = []
            row = replace(  # of its own temperature, by which V2 divides after it has called us
                request,
                key=next(self._numbers),
                tokens=tokens,
                num_prompt=int(self._states.prompt_len.np[slot]),
            )
            self._by_slot[slot] = _Held(row, tokens, int(self._states.prefill_len.np[slot]))
        return None if before is None else before.row.key  # type: ignore[return-value]

    def is_guided(self, slot: int) -> bool:
        return slot in self._by_slot

    def ask_for_tokens(self) -> None:
        """Launch the copy of all that is new; to be called when slots are filled, before the model."""
        self._take_tokens()
        self._arriving = self._missing((slot, held, held.num_on_device) for slot, held in self._by_slot.items())

    def batch(self, context: Any) -> Batch:
        """The rows to be guided in this step, with their tokens, by V2's description of the step.

        Of that ``expanded_idx_mapping`` is the slot of each row of the logits, ``idx_mapping_np`` that of each
        request, and ``seq_lens_upper_bound_np`` the tokens of each request that its row has seen; more entries may
        follow, which mean nothing.

        Rows of a prompt that is still computed in chunks are left out: the tokens that they would draw are
        discarded.
        """
        slots = context.idx_mapping_np.tolist()
        num_rows = context.expanded_idx_mapping.shape[0]
        if num_rows != len(slots):
            raise GuidanceError(
                f"vLLM samples {num_rows} rows for {len(slots)} requests, and guidance needs "
                "one row for each: turn speculative decoding off"
            )
        self._take_tokens()
        ends = context.seq_lens_upper_bound_np.tolist()
        present = []
        for index, (slot, end) in enumerate(zip(slots, ends, strict=False)):
            held = self._by_slot.get(slot)
            if held is not None and end >= self._states.prefill_len.np[slot]:
                if held.row.index != index:
                    held.row = replace(held.row, index=index)
                present.append((slot, held, end))
        self._complete(present)
        return Batch([held.row for _, held, _ in present], len(slots))

    def _complete(self, present: Sequence[tuple[int, _Held, int]]) -> None:
        """Give each request its first ``end`` tokens and no others; expect one more of each."""
        for _, held, end in present:
            del held.tokens[end:]
        if any(len(held.tokens) < end for _, held, end in present):  # vLLM computed tokens that it had not reported
            self._arriving = self._missing(present)
            self._take_tokens()
        for _, held, end in present:
            held.num_on_device = end + 1

    def _missing(self, ends_by_slot: Iterable[tuple[int, _Held, int]]) -> _NewTokens | None:
        """Ask for the tokens of each request up to an end, as far as they are not here; None where all are."""
        source = self._states.all_token_ids.gpu
        parts = [
            (held, slot, len(held.tokens), min(end, source.shape[1]))
            for slot, held, end in ends_by_slot
            if len(held.tokens) < min(end, source.shape[1])
        ]
        if not parts:
            return None
        slots = [slot for _, slot, start, end in parts for _ in range(start, end)]
        positions = [position for _, _, start, end in parts for position in range(start, end)]
        where = torch.tensor([slots, positions], pin_memory=source.is_cuda).to(source.device, non_blocking=True)
        new = [(held.tokens, end - start) for held, _, start, end in parts]
        return Arriving(source[where[0], where[1]]), new

    def _take_tokens(self) -> None:
        """Give the requested tokens to their sequences; waits for them."""
        if self._arriving is not None:
            (arriving, parts), self._arriving = self._arriving, None
            tokens = iter(arriving.read())
            for sequence, number in parts:
                sequence.extend(islice(tokens, number))
