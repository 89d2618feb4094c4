"""Runs inside a vLLM server: makes the guidance of the benchctl that started it known there.

Only this directory is on the server's path, so that nothing else of benchctl's environment shadows the server's own
packages: benchctl is loaded from its file.
"""

import importlib.util
import sys
from pathlib import Path

if "benchctl" not in sys.modules:
    _PACKAGE = Path(__file__).resolve().parents[3]
    _SPEC = importlib.util.spec_from_file_location(
        "benchctl", _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)]
    )
    if _SPEC is None or _SPEC.loader is None:
        raise ImportError(f"{_PACKAGE} holds no package; install benchctl again")
    _MODULE = importlib.util.module_from_spec(_SPEC)
    sys.modules["benchctl"] = _MODULE
    _SPEC.loader.exec_module(_MODULE)

from benchctl.guided.vllm.plugin import LenvmLogitsProcessor

__all__ = ["LenvmLogitsProcessor"]
