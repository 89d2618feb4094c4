"""The effective configuration of a server: what it says of itself, beside what it is asked for."""

from collections.abc import Mapping
from typing import Any

from benchctl.profile.model import VariantSettings


def flat_configuration(settings: VariantSettings, told: Mapping[str, Any]) -> dict[str, Any]:
    """``model``, then the keys of each part behind its name and a dot; ``told`` is the server's part."""
    config: dict[str, Any] = {"model": settings.model} | {f"server.{key}": value for key, value in told.items()}
    for name, section in (("sampling", settings.sampling), ("guidance", settings.guidance)):
        if section is not None:
            config |= {f"{name}.{key}": value for key, value in section.model_dump(mode="json").items()}
    return config
