"""The simulator as an engine: a process of its own, reached by HTTP."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchctl import __version__
from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.engines.engine import (
    LOOPBACK,
    Client,
    Engine,
    LaunchSite,
    PromptCounter,
    own_options,
    plain_body,
    profile_errors,
    signatures,
    streamed,
)
from benchctl.engines.metrics_page import series_of
from benchctl.engines.sim.options import COST_MODELS, SimOptions
from benchctl.errors import UsageError
from benchctl.profile.model import VariantSettings
from benchctl.records.files import encode
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import warnings_of
from benchctl.untrusted import METRICS_BYTES
from benchctl.untrusted.http import fetch, fetch_json
from benchctl.workload.datasets.base import in_data_directory

_LAG_FRAC: Final = 0.02
"""Share of the load's wall time that the simulator may fall behind without a word ..."""
_HICCUP_S: Final = 0.5
"""... and beyond this time as well, which a hiccup of a busy machine does not take, the run is suspect."""
_SIGNATURES: Final = (
    *signatures(
        "port-taken", "end the process that holds the port, or leave port out of the profile",
        "address already in use",
    ),
    *signatures("out-of-memory", "lower num_kv_blocks or max_num_seqs, or free memory", "MemoryError"),
    *profile_errors("bad-model", "name a built-in shape or a directory with a config.json", "unknown model"),
    *profile_errors("bad-model", "name a device of the hardware table", "unknown hardware"),
    *profile_errors("bad-flag", "correct the engine option that the message names", ": error:"),
)  # fmt: skip


class SimEngine(Engine):
    """The simulated server of ``python -m benchctl.sim``."""

    kind = "sim"
    needs_first_generation = False
    signatures = _SIGNATURES

    def check_available(self, settings: VariantSettings) -> None:
        """Raises UsageError for settings that it cannot serve."""
        options = own_options(settings, SimOptions)
        if not COST_MODELS[options.cost_model].uses_shapes:
            return
        try:
            shape, hardware = shape_for(settings.model), hardware_for(options.hardware)
            for beside in filter(None, (options.value_model, options.draft_model)):
                shape_for(beside)
            if options.layer_profile is not None:
                from benchctl.interop.layer_profile import find_tables  # noqa: PLC0415 - numpy

                find_tables(in_data_directory(options.layer_profile))
            if options.step_time_model is not None:
                from benchctl.steptime.model import read_model  # noqa: PLC0415 - numpy
                from benchctl.steptime.work import Deployment  # noqa: PLC0415 - numpy

                deployment = Deployment(
                    shape=shape, hardware=hardware, tensor_parallel=options.tensor_parallel_size
                )
                read_model(Path(options.step_time_model).expanduser()).check_deployment(deployment)
        except UsageError as error:
            raise UsageError(f"engine 'sim', variant {settings.variant!r}: {error}") from error

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        """The command line, which names the file of the server's settings; writes that file."""
        options = own_options(settings, SimOptions).model_dump(mode="json", exclude={"port"})
        site.description.write_bytes(encode({**options, "model": settings.model, "noise_seed": site.noise_seed}))
        argv = (sys.executable, "-m", "benchctl.sim", "--host", LOOPBACK, "--port", str(site.port))
        return (*argv, "--step-log", str(site.step_log), "--config", str(site.description))

    def time_scale(self, settings: VariantSettings) -> float:
        return own_options(settings, SimOptions).time_scale

    def request_fields(self, request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
        body = plain_body(request, settings) | {"return_token_ids": True}
        if settings.guidance is not None:
            body["custom_params"] = settings.guidance.model_dump(exclude_none=True)
        return streamed(request, settings, body)

    def prompt_counter(self, settings: VariantSettings) -> PromptCounter:
        return PromptCounter()

    async def announce(
        self,
        client: Client,
        requests: Sequence[PreparedRequest],
        *,
        max_concurrency: int | None,
        is_warmup: bool,
        num_warmups: int = 0,
    ) -> None:
        """Tell the server what comes next and when, so that its virtual arrivals are exact."""
        body = {
            "requests": [
                {"request_id": request.request_id, "arrival_ns": request.arrival_ns}
                | ({"think_ns": request.think_ns} if request.turn else {})
                for request in requests
            ],
            "max_concurrency": max_concurrency,
            "is_warmup": is_warmup,
            "num_warmups": num_warmups,
        }
        response = await fetch(
            client, "POST", "/sim/schedule", content=encode(body), headers={"Content-Type": "application/json"}
        )
        response.raise_for_status()

    async def effective_config(self, client: Client, settings: VariantSettings, site: LaunchSite) -> dict[str, Any]:
        return await fetch_json(client, "/server_info")

    async def after_load_warnings(self, client: Client) -> tuple[ResultWarning, ...]:
        response = await fetch(client, "GET", "/metrics", max_bytes=METRICS_BYTES)
        response.raise_for_status()
        values = {name.partition("{")[0]: value for name, value in series_of(response.text).items()}
        lag_s, wall_s = values["benchctl_sim:lag_seconds"], values["benchctl_sim:phase_wall_seconds"]
        behind = (
            f"the simulator fell {lag_s:.3f} s behind in {wall_s:.3f} s: times seen by the client are longer than "
            "the simulated ones, and tokens come in bunches; lower time_scale or free the machine. Steps are exact"
        )
        lost = (
            "announced requests did not come, so the simulator left the schedule: arrivals and steps depend on the "
            "machine's timing"
        )
        return warnings_of(
            {
                "sim-far-behind": behind if lag_s > max(_LAG_FRAC * wall_s, _HICCUP_S) else None,
                "sim-lag": behind if _LAG_FRAC * wall_s < lag_s <= _HICCUP_S else None,
                "sim-schedule-lost": lost if values["benchctl_sim:abandoned_phases"] > 0 else None,
            }
        )

    def build(self, settings: VariantSettings) -> Mapping[str, str]:
        """Ours: the simulator is a part of benchctl."""
        return {"benchctl": __version__}

    def has_steps(self, settings: VariantSettings) -> bool:
        return True
