"""The job script of an array of blocks, from the ``cluster`` settings; submitit writes it."""

import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchctl.profile.sections import ClusterSettings
from benchctl.units import SECONDS_PER_MINUTE

MAX_JOB_NAME: Final = 60
PYTHON_IN_CONTAINER: Final = "python3"
_MODULE: Final = ("-m", "benchctl")


def block_words(settings: ClusterSettings, directory: Path, block: int, *, keeps_raw_logs: bool) -> tuple[str, ...]:
    """The command that measures one block on a node, inside the container where apptainer starts it."""
    options = ("--keep-raw-logs",) if keeps_raw_logs else ()
    python = settings.python or (sys.executable if settings.container is None else PYTHON_IN_CONTAINER)
    words = (python, *_MODULE, "run", "--block", str(block), "--into", str(directory), "--quiet", *options)
    if settings.container is None or settings.container_runtime != "apptainer":
        return words
    # --nv passes the devices and the driver on; the directory is bound, because only some are by default.
    return ("apptainer", "exec", "--nv", "--bind", str(directory), settings.container, *words)


def launcher_python(settings: ClusterSettings) -> str:
    """The interpreter of the task itself as a word of a shell; with pyxis it is in the container, too."""
    in_container = settings.container is not None and settings.container_runtime == "pyxis"
    if in_container:
        return shlex.quote(settings.python or PYTHON_IN_CONTAINER)
    inside_apptainer = settings.container is not None
    return shlex.quote(sys.executable if inside_apptainer else settings.python or sys.executable)


def script_parameters(
    settings: ClusterSettings, name: str, num_gpus: int, num_blocks: int, directory: Path
) -> dict[str, Any]:
    """The parameters of submitit for an array of ``num_blocks`` blocks with ``num_gpus`` each."""
    limit_s = settings.time_s
    options = {
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "cpus_per_task": settings.cpus,
        "mem": None if settings.mem is None else str(settings.mem),
        "constraint": settings.constraint,
        "exclude": settings.exclude,
        "exclusive": settings.exclusive or None,
        "gres": f"gpu:{num_gpus}" if num_gpus else None,
    }
    return {
        **{key: value for key, value in options.items() if value is not None},
        "job_name": f"benchctl-{name}"[:MAX_JOB_NAME],
        "time": None if limit_s is None else math.ceil(limit_s / SECONDS_PER_MINUTE),
        "wckey": None,
        "signal_delay_s": settings.warn_s,
        "array_parallelism": min(settings.parallel or num_blocks, num_blocks),
        "stderr_to_stdout": True,
        "setup": list(settings.setup) or None,
        "srun_args": list(_srun_words(settings, directory)),
        "additional_parameters": {"requeue": True},
    }


def _srun_words(settings: ClusterSettings, directory: Path) -> Sequence[str]:
    """Words for ``srun``, which takes over neither the number of cores nor how files are opened."""
    words = ["--open-mode=append"]  # a job that begins again goes on in its log
    if settings.cpus is not None:
        words.append(f"--cpus-per-task={settings.cpus}")
    if settings.container is not None and settings.container_runtime == "pyxis":
        words += [f"--container-image={settings.container}", f"--container-mounts={directory}:{directory}"]
    return words


def script_text(parameters: dict[str, Any], settings: ClusterSettings, folder: Path, num_blocks: int) -> str:
    """The text of the script as it is submitted; a single block is a plain job."""
    from submitit.slurm.slurm import _make_sbatch_string  # noqa: PLC0415 - there is no public way without Slurm

    command = f"{launcher_python(settings)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    map_count = num_blocks if num_blocks > 1 else None
    return _make_sbatch_string(command=command, folder=folder, map_count=map_count, **parameters)


_NOT_PASSED_ON: Final = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "XAUTHORITY",
    "DISPLAY",
)
"""Variables of a login that mean nothing on a node, or another device there."""
_OF_A_JOB: Final = ("SLURM_", "SRUN_", "SUBMITIT_", "PMI_", "PMIX_")
"""Beginnings of variables of the job in which we may run ourselves; ``sbatch`` and ``srun`` would obey them."""
_OF_THE_CLUSTER: Final = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER"})


def variables_not_passed_on(environment: Sequence[str] | None = None) -> tuple[str, ...]:
    """The variables of this environment that a task must not inherit. Everything else goes along."""
    names = os.environ if environment is None else environment
    return tuple(
        name
        for name in names
        if name in _NOT_PASSED_ON or (name.startswith(_OF_A_JOB) and name not in _OF_THE_CLUSTER)
    )
