"""Experts whose weights a step reads, by the rule that a model was fitted with.

``linear`` and ``uniform`` are those of ``costs/experts.py``; ``measured`` interpolates in a table of the user's,
for models whose routing prefers some experts. Limiting a token to some groups of experts, as DeepSeek does, leaves
the uniform rule as it is: a token still reads each expert with probability k / N.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from benchctl.errors import UsageError
from benchctl.steptime.structure import ExpertsRead
from benchctl.steptime.work import Deployment

if TYPE_CHECKING:
    from collections.abc import Callable

    NumExperts: TypeAlias = Callable[[Any], Any]


def experts_read_by(deployment: Deployment, rule: ExpertsRead) -> "NumExperts | None":
    """Distinct experts of one layer that so many tokens read; None for a dense model.

    Raises UsageError for ``measured`` without a table.
    """
    moe = deployment.shape.moe
    if moe is None:
        return None
    rules: dict[str, NumExperts] = {"linear": moe.linear_experts, "uniform": moe.uniform_experts}
    if rule in rules:
        return rules[rule]
    if not deployment.measured_experts:
        raise UsageError(
            f"{deployment.shape.name}: experts that a step reads are to be measured ones, but there is no table of "
            "them; state measured_experts, or take the rule 'uniform'"
        )
    tokens_of, experts_of = (
        np.array(column) for column in zip((0.0, 0.0), *deployment.measured_experts, strict=True)
    )
    return lambda tokens: np.interp(tokens, tokens_of, experts_of)
