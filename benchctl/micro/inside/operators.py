"""The operators that one run of a piece of work calls: about as many launches as a GPU sees."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def count_operators(work: Callable[[], None]) -> int:
    """Operators that compute; views, which launch nothing, are not counted.

    An operator that torch composes of others counts once; a library may launch more than one kernel for it, such as
    a product that it splits.
    """
    with _Counter() as counter:
        work()
    return counter.count


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled, and to skip the compiler torch would first import it, for a second."""
        return False

    def __torch_dispatch__(
        self, operator: torch._ops.OpOverload, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += not _is_view(operator)
        return operator(*args, **(kwargs or {}))


def _is_view(operator: torch._ops.OpOverload) -> bool:
    """True where a result shares memory with an argument and nothing is written."""
    results = operator._schema.returns  # noqa: SLF001 - it has no public name
    return any(result.alias_info is not None and not result.alias_info.is_write for result in results)
