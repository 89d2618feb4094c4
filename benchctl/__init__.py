"""benchctl: what does a change to the decode path of an LLM server cost, where does the cost sit, and is it real?

From Python: ``benchctl.load_results``, ``benchctl.compare``, ``benchctl.load_profile`` and ``benchctl.Profile``
(see ``benchctl.api``). They are imported on first use, so that ``import benchctl`` and the command line start fast.

To read the code, open these files in this order:

1. ``records/record.py``, ``schema.py`` and ``directory.py``: a result directory. Everything before it
   measures, everything after it reads.
2. ``profile/model.py`` and ``profile/planning.py``: what an experiment is, and the order of its runs.
3. ``measure/run.py``: one run, from a fresh server to its last record.
4. ``analysis/metrics/table.py`` and ``analysis/metrics/run.py``: every derived number and its formula.
5. ``analysis/compare/compare.py``: the verdict.

Imports go downwards only; ``docs/architecture.md`` is the map.
"""

TYPE_CHECKING = False  # the constant of `typing`, whose import would take as long as the start of the interpreter
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.2.0"
__all__ = ["Profile", "__version__", "compare", "load_profile", "load_results"]  # see __getattr__


def __getattr__(name: str) -> "Any":
    """Import the Python interface on first use: numpy and scipy come with it."""
    if name not in __all__:
        raise AttributeError(f"module 'benchctl' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - on first use, as above

    return getattr(import_module("benchctl.api"), name)
