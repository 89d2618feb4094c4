"""Counts of what torch's dispatcher is asked for: on a GPU each is a launch, or a few."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class OperationCounts(TorchDispatchMode):
    """Counts operations that compute or copy, by name; views do neither."""

    def __init__(self):
        super().__init__()
        self.by_name = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.by_name[str(func)] += 1
        return result

    @property
    def total(self):
        return self.by_name.total()
