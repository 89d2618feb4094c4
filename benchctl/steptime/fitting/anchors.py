"""Typical coefficients: they decide what the data of a fit leave open.

A log of one model cannot tell its weights from its layers: both are the same in every step. Any split of the sum
fits that log equally well, and only one predicts another model. The split nearest to these values is taken,
measured in their spreads. The ridge lets them pull on what the data determine, as far as noise leaves it open.

Sources. Weights and layers: vidur's profiles of the linear layers of Llama-2-7B and 70B (H100, TP 1 to 8, 8 to 64
tokens), time of a layer = c bytes / bandwidth + t0 by least squares on relative error: c = 1.19 and t0 = 32 us,
MAPE 3.1 % (A100: 1.33, 36 us, 3.0 %). NVIDIA's aiconfigurator, vLLM 0.14: 1,601 matrix products of up to 64 rows
give c = 1.11 and 4.0 us each, and attention of a small batch 11 to 13 us a layer, which is not among vidur's.
Compute: 1.4 to 2.0 and key-value memory 1.2 to 1.6, the ranges that the published model calls typical. All-reduce:
the latency floor is part of the feature. A row: its logits are read a few times (128,000 values of 32 bits take
0.15 us at the H100's bandwidth), and the host's work for it is hidden behind the step or takes 5 to 20 us. The
published form's own typical values: 1.4 to 2.0, 1.2 to 1.6, and 3 to 5 for all-reduce.
"""

from dataclasses import dataclass
from typing import Final

from benchctl.steptime.structure import Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A typical value of a coefficient, and how far it usually lies from that."""

    value: float
    spread: float


_OVERHEADS: Final[dict[str, Anchor]] = {
    "requests": Anchor(value=5.0, spread=10.0),
    # The host's part of guidance differs by orders of magnitude between implementations: hardly a pull.
    "value_model": Anchor(value=2.0, spread=2.0),
    "guided_steps": Anchor(value=5000.0, spread=20000.0),
    "guided_rows": Anchor(value=100.0, spread=1000.0),
    "candidates": Anchor(value=20.0, spread=200.0),
}
_CORRECTED: Final[dict[str, Anchor]] = {
    "compute": Anchor(value=1.6, spread=0.4),
    "memory": Anchor(value=1.15, spread=0.1),
    "weights": Anchor(value=1.15, spread=0.1),
    "kv": Anchor(value=1.3, spread=0.3),
    "all_reduce": Anchor(value=1.0, spread=0.5),
    "layers": Anchor(value=45.0, spread=15.0),
    "steps": Anchor(value=100.0, spread=100.0),
    **_OVERHEADS,
}
_ORIGINAL: Final[dict[str, Anchor]] = {
    "prefill": Anchor(value=1.7, spread=0.3),
    "decode": Anchor(value=1.4, spread=0.2),
    "static_weights": Anchor(value=1.3, spread=0.3),
    "expert_weights": Anchor(value=1.0, spread=0.4),
    "all_reduce": Anchor(value=4.0, spread=2.0),
    # Without a term for layers, theirs is in that of steps: 20 to 80 layers of 45 us.
    "steps": Anchor(value=2000.0, spread=1500.0),
    **_OVERHEADS,
}


def anchor_of(name: str, structure: Structure) -> Anchor:
    """The typical value of a feature's coefficient in a structure. KeyError for the roofline, which has none."""
    return (_ORIGINAL if structure == "original" else _CORRECTED)[name]
