"""Errors of predictions by model, tensor-parallel size, phase, batch and context."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.steptime.diagnosis.predictions import Accuracy, Predictions, accuracy_of
from benchctl.steptime.fitting.least_squares import Floats
from benchctl.steptime.work import ObservedSteps, Quantity

Words: TypeAlias = npt.NDArray[np.str_]

_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CONTEXTS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def buckets(predictions: Predictions) -> dict[str, tuple[Accuracy, ...]]:
    """Errors by model, tensor-parallel size, phase, batch and mean context of a row."""
    num_seqs = np.concatenate([_each(run, run.work.num_seqs) for run in predictions.runs])
    context = np.concatenate([_each(run, run.work.context) for run in predictions.runs])
    phase = np.concatenate([phases_of(run) for run in predictions.runs])
    models = np.array([run.deployment.shape.name for run in predictions.runs])[predictions.run_of]
    sizes = np.array([f"TP{run.deployment.tensor_parallel}" for run in predictions.runs])[predictions.run_of]
    return {
        "model": _by_label(predictions, models),
        "tensor parallel": _by_label(predictions, sizes),
        "phase": _by_label(predictions, phase),
        "batch": _by_label(predictions, bin_labels(num_seqs, _BATCHES)),
        "context": _by_label(predictions, bin_labels(context / np.maximum(num_seqs, 1.0), _CONTEXTS)),
    }


def phases_of(run: ObservedSteps) -> Words:
    """``prefill``, ``decode`` or ``mixed`` for each step."""
    prefill, decode = _each(run, run.work.prefill_tokens) > 0, _each(run, run.work.decode_tokens) > 0
    return np.where(prefill & decode, "mixed", np.where(prefill, "prefill", "decode"))


def bin_labels(values: Floats, edges: Sequence[int]) -> Words:
    """The bin of each value: from one edge up to the next."""
    labels = [
        f"< {edges[0]}",
        *(f"{a} to {b - 1}" for a, b in pairwise(edges)),
        f">= {edges[-1]}",
    ]
    return np.array(labels)[np.searchsorted(edges, values, side="right")]


def _by_label(predictions: Predictions, labels: Words) -> tuple[Accuracy, ...]:
    """Errors for each label, bins in the order of their values."""
    names = sorted(set(labels.tolist()), key=_bin_order)
    return tuple(accuracy_of(predictions, np.flatnonzero(labels == name), name) for name in names)


def _bin_order(label: str) -> tuple[float, str]:
    number = label.removeprefix(">= ").removeprefix("< ").split(" ")[0]
    is_number = number.isdigit()
    return (float(number) - 0.5 * label.startswith("<") if is_number else 0.0), label


def _each(run: ObservedSteps, quantity: Quantity) -> Floats:
    """A quantity with one value for each step."""
    return np.broadcast_to(np.asarray(quantity, dtype=np.float64), len(run.duration_us))
