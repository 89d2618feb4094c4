"""A file with the keys of ``cluster``, which replaces that section of a profile."""

from pathlib import Path

from benchctl.profile.cluster import ClusterSettings
from benchctl.profile.errors import profile_error, validate
from benchctl.profile.layers import Layers
from benchctl.profile.yaml import plain_value_problems


def load_cluster(path: Path) -> ClusterSettings:
    """Read a YAML mapping of the keys of ``cluster``. Raises ProfileError with every error and its line."""
    layers = Layers()
    tree = layers.file(path)
    settings, problems = validate(tree.values, ClusterSettings, reports_missing=layers.is_whole)
    errors = (*layers.errors, *tree.errors([*plain_value_problems(tree.values), *problems]))
    if settings is None or errors:
        raise profile_error(errors)
    return settings
