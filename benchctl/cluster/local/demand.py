"""Demands of an experiment on a host that measures several of its blocks at a time."""

from collections.abc import Iterable, Mapping

from benchctl.cluster.slots import Slot
from benchctl.errors import RecordError, UsageError
from benchctl.measure.server.resources import core_ranges
from benchctl.measure.telemetry.visible_devices import VARIABLE
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import PlannedRun
from benchctl.units import count_of


def check_beside(profile: Profile, num: int) -> None:
    """Raise UsageError for an experiment of which no ``num`` blocks can be measured beside each other."""
    for variant, cell in arms(profile):
        settings = variant_settings(profile, variant, cell)
        if VARIABLE in getattr(settings.server, "env", {}):
            raise UsageError(
                f"variant {settings.variant!r}: engine.options.env.{VARIABLE} names the devices of all servers, "
                f"and --on local gives each block its own; leave it out, and set {VARIABLE} for benchctl itself to "
                "choose among the devices of this host"
            )
        if num > 1 and (reason := _only_one(profile, settings)) is not None:
            raise UsageError(f"variant {settings.variant!r}: {reason}; take --parallel 1, or leave out --on local")


def _only_one(profile: Profile, settings: VariantSettings) -> str | None:
    """The reason why two servers of these settings cannot exist at the same time."""
    if profile.engine.kind == "attach":
        return "the server is the one that is attached, which blocks that run beside each other would share"
    if settings.server.fixed_port is not None:
        return f"engine.options.port is {settings.server.fixed_port}, which one server at a time can have"
    return None


def slot_text(slot: Slot) -> str:
    """Devices and cores of a slot in words."""
    cores = f"{count_of(len(slot.cores), 'core')} ({core_ranges(frozenset(slot.cores))})"
    return f"{', '.join(slot.gpus)}, {cores}" if slot.gpus else cores


def devices_begun_on(results: ResultDirectory, pending: Iterable[PlannedRun]) -> Mapping[int, tuple[str, ...]]:
    """Devices of the runs that are done in blocks with ``pending`` ones, where the numbers depend on them."""
    is_pending = {planned.run_id for planned in pending}
    blocks = {planned.block for planned in results.due_plan().runs if planned.run_id in is_pending}
    devices: dict[int, tuple[str, ...]] = {}
    for planned in results.due_plan().runs:
        if planned.block not in blocks or planned.run_id in is_pending or planned.block in devices:
            continue
        try:
            record = results.run(planned.run_id).read()
        except RecordError:
            continue
        if record.clock != "virtual" and record.node is not None:
            devices[planned.block] = tuple(gpu.uuid or str(gpu.index) for gpu in record.node.gpus)
    return devices
