"""An engine that starts ``programs/stubborn_server.py``, and what its tests share."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
from support.servers import paced_engine
from support.servers.paced_engine import PacedEngine

from benchctl.engines.engine import Diagnosis, LaunchSite
from benchctl.measure.server.process import is_alive
from benchctl.measure.server.server import Launch
from benchctl.records.record import Call, PreparedRequest

SERVER = Path(__file__).parent / "programs" / "stubborn_server.py"
CORE = "Stubborn::EngineCore"
_SIGNATURES = {
    "address already in use": Diagnosis(cause="port-taken", remedy="choose another port", is_final=True),
    "out of memory": Diagnosis(cause="out-of-memory", remedy="lower the number of blocks"),
    "unrecognized": Diagnosis(cause="bad-flag", remedy="correct the flag", is_profile_error=True),
}


@dataclass(frozen=True)
class StubbornEngine(PacedEngine):
    """The paced engine with habits, and with flags for each variant beside those for all."""

    essential_processes: tuple[str, ...] = (CORE,)
    flags_of: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def argv(self, settings: Any, site: LaunchSite) -> tuple[str, ...]:
        python, _, *rest = super().argv(settings, site)
        of_variant = self.flags_of.get(settings.variant, ()) if settings is not None else ()
        return (python, str(SERVER), *rest, *of_variant)

    def request_call(self, request: PreparedRequest, settings: Any) -> Any:
        body = {"prompt": request.prompt or "{}", "max_tokens": request.max_tokens, "n": request.n}
        headers = {"x-request-id": request.request_id}
        return Call(request=request, path="/v1/completions", headers=headers, body=msgspec.json.encode(body))

    def diagnose(self, log_tail: str) -> Diagnosis | None:
        return next((found for text, found in _SIGNATURES.items() if text in log_tail), None)


def launch(directory: Path, *flags: str, **timeouts: float) -> Launch:
    """How to start a stubborn server that writes its truth and its log into ``directory``."""
    engine = StubbornEngine(truth=directory / "truth.jsonl", flags=flags)
    how = paced_engine.launch(directory, **timeouts)
    site = LaunchSite(port=how.port, directory=directory)
    return replace(
        how,
        argv=engine.argv(None, site),
        env=dict(os.environ),
        diagnose=engine.diagnose,
        essential_processes=engine.essential_processes,
    )


def processes_of(mark: str) -> list[psutil.Process]:
    """Living processes whose command line mentions ``mark``, but for this one's family."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in " ".join(process.cmdline()) and is_alive(process) and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found
