"""The configuration of one simulated server."""

from typing import Annotated, Any, Final

from pydantic import Field

from benchctl.engines.sim.options import FAULTS, SimOptions
from benchctl.profile.bounds import DEFAULT_MODEL
from benchctl.profile.choices import ContextLength

MAX_MODEL_LEN: Final = 32768


class SimConfig(SimOptions):
    """The options of the engine, and what a server needs besides; ``value_model`` is None on a stock server.

    ``revision`` is the generation of the guided fork: V2 skips the value model at a neutral scale and extends
    and scores in one pass when no row lags; V4 scores at every scale and always in one pass; V1 does neither.
    """

    model: str = DEFAULT_MODEL
    noise_seed: int = 0
    max_model_len: ContextLength = MAX_MODEL_LEN
    """Tokens of prompt and output together."""
    schedule_patience_s: Annotated[float, Field(ge=0)] = 30.0
    """Time that the core waits for an announced request before it gives up the schedule."""

    @property
    def has_cache(self) -> bool:
        """Prompts may be found in a cache, so that usage counts the tokens that were."""
        return self.enable_prefix_caching or self.cached_prompts is not None

    def server_info(self) -> dict[str, Any]:
        """The settings that the server reports: those that two servers of one configuration share."""
        # Settings in which two servers of one configuration may differ
        unlike = {"port", "noise_seed", "start_delay_s", "schedule_patience_s"}
        settings = self.model_dump(exclude=unlike | (set(FAULTS) - self.faults)).items()
        texts = {name: ",".join(map(str, value)) for name, value in settings if isinstance(value, tuple)}
        return {"clock": "virtual", **dict(settings), **texts}
