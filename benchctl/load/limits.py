"""Limits of one request: to its first token, from token to token, to its end."""

from typing import Final

from benchctl.load.exchange import Exchange
from benchctl.profile.model import Timeouts
from benchctl.records.run import RequestError
from benchctl.units import NS_PER_S

_LOOKS: Final = 20
_LEAST_S: Final = 0.05
_MOST_S: Final = 1.0


def look_s(timeouts: Timeouts) -> float:
    """How often to look at the limits: a twentieth of the shortest, but neither below 50 ms nor above 1 s."""
    limits_s = (timeouts.request_s, timeouts.first_token_s, timeouts.between_tokens_s)
    shortest_s = min(limit_s for limit_s in limits_s if limit_s is not None)
    return min(max(shortest_s / _LOOKS, _LEAST_S), _MOST_S)


def limit_reached(exchange: Exchange, timeouts: Timeouts, now_ns: int) -> RequestError | None:
    """The limit that ``exchange`` has reached at ``now_ns``; None while there is none.

    Only output counts as a token, not a comment that keeps the connection alive, nor an event that names the role.
    What has arrived is therefore understood first; once per limit, as only then it might have been reached.
    """
    if not exchange.sent_ns or exchange.failure is not None or not now_ns:
        return None
    if _is_past(timeouts.request_s, exchange.sent_ns, now_ns):
        return _error("total-timeout", f"no end within {timeouts.request_s:g} s (timeouts.request_s)")
    waits_s = [limit_s for limit_s in (timeouts.first_token_s, timeouts.between_tokens_s) if limit_s is not None]
    if not waits_s or not _is_past(min(waits_s), exchange.output_ns or exchange.sent_ns, now_ns):
        return None
    exchange.digest_all()
    if exchange.output_ns:
        limit_s, what, key = timeouts.between_tokens_s, "between-tokens-timeout", "between_tokens_s"
    else:
        limit_s, what, key = timeouts.first_token_s, "first-token-timeout", "first_token_s"
    if limit_s is None or not _is_past(limit_s, exchange.output_ns or exchange.sent_ns, now_ns):
        return None
    return _error(what, f"no {'further ' if exchange.output_ns else ''}token within {limit_s:g} s (timeouts.{key})")


def _is_past(limit_s: float, since_ns: int, now_ns: int) -> bool:
    return now_ns - since_ns > limit_s * NS_PER_S


def _error(kind: str, message: str) -> RequestError:
    return RequestError(kind=kind, message=message)
