"""What tests of engines start from: an interpreter and a model as far as anybody looks, settings, a request."""

import json
import sys
from pathlib import Path
from typing import Any

from benchctl.profile.engine_table import options_class
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.records.record import Message, PreparedRequest

HELLO = (Message(role="user", content="Hello there"),)


def interpreter_with(directory: Path, package: str, version: str = "0.32.0") -> str:
    """An interpreter whose environment has the metadata of a package and nothing else."""
    information = directory / "packages" / f"{package.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    script = directory / f"python-{package}"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={information.parent} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def model_in(directory: Path, **config: Any) -> str:
    """A directory that looks like a model with room for 128 tokens."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 128, **config}))
    return str(directory)


def settings_of(
    kind: str,
    model: object = "m",
    *,
    sampling: Sampling | None = None,
    guidance: Guidance | None = None,
    **options: Any,
) -> VariantSettings:
    """Settings of variant ``v`` on a server of this kind with these options."""
    return VariantSettings(
        variant="v",
        model=str(model),
        server=options_class(kind)(**options),
        sampling=sampling or Sampling(),
        guidance=guidance,
    )


def asked(*, chat: bool = False, **changes: Any) -> PreparedRequest:
    """A request for 8 tokens after a prompt of 5."""
    text = {"messages": HELLO} if chat else {"prompt": "Hello there"}
    usual = {"request_id": "r", "index": 0, "arrival_ns": 0, "prompt_tokens": 5, "max_tokens": 8}
    usual |= {"ignore_eos": True, "n": 1, "seed": 3, "source": "test"}
    return PreparedRequest(**{**usual, **text, **changes})
