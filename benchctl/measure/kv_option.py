"""The option that holds the size of the KV cache, and the sign that benchctl computed it."""

from typing import Final

from benchctl.profile.model import Profile

KV_OPTION: Final = "kv_cache_memory_bytes"
COMPUTED: Final = "kv-memory-computed"
"""Code of the note by which a result directory says that benchctl chose the size."""


def with_kv_bytes(profile: Profile, num_bytes: object) -> Profile:
    """The profile with this size of the KV cache in the options of its engine."""
    options = {**profile.engine.options, KV_OPTION: num_bytes}
    return profile.model_copy(update={"engine": profile.engine.model_copy(update={"options": options})})
