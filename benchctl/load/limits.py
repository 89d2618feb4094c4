"""Time limits of one request: to its first token, between tokens, to its end."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from benchctl.profile.sections import Timeouts
from benchctl.records.record import ChoiceRecord, RequestError
from benchctl.units import NS_PER_S

if TYPE_CHECKING:
    from benchctl.load.exchange import Exchange

_CHECKS_PER_LIMIT: Final = 20
_LEAST_S: Final = 0.05
_MOST_S: Final = 1.0


def check_interval_s(timeouts: Timeouts) -> float:
    """Seconds between checks of the limits: a twentieth of the shortest, at least 50 ms and at most 1 s."""
    limits_s = (timeouts.connect_s, timeouts.request_s, timeouts.first_token_s, timeouts.between_tokens_s)
    shortest_s = min(limit_s for limit_s in limits_s if limit_s is not None)
    return min(max(shortest_s / _CHECKS_PER_LIMIT, _LEAST_S), _MOST_S)


def limit_reached(exchange: "Exchange", timeouts: Timeouts, now_ns: int) -> RequestError | None:
    """The limit that ``exchange`` has reached at ``now_ns``; None while there is none.

    Only output counts as a token: no comment that keeps the connection alive, and no event that names the role.
    Arrived bytes are therefore decoded first, and only when the limit may have been reached.
    """
    if exchange.failure is not None or not now_ns:
        return None
    if not exchange.sent_ns:
        return _late_connection(exchange, timeouts, now_ns)
    if (total := total_reached(exchange, timeouts, now_ns)) is not None:
        return total
    waits_s = [limit_s for limit_s in (timeouts.first_token_s, timeouts.between_tokens_s) if limit_s is not None]
    if not waits_s or not _is_past(min(waits_s), exchange.output_ns or exchange.sent_ns, now_ns):
        return None
    exchange.decode_all()
    if exchange.output_ns:
        return _late_token(timeouts, exchange.output_ns, now_ns)
    return _late_first_token(timeouts, exchange.sent_ns, now_ns)


def total_reached(exchange: "Exchange", timeouts: Timeouts, now_ns: int) -> RequestError | None:
    """The limit of the whole answer, if it is reached; nothing is decoded for it."""
    if not exchange.sent_ns or not _is_past(timeouts.request_s, exchange.sent_ns, now_ns):
        return None
    return _error("total-timeout", f"no end within {timeouts.request_s:g} s (timeouts.request_s)")


def limit_passed(choices: Sequence[ChoiceRecord], timeouts: Timeouts, sent_ns: int) -> RequestError | None:
    """The first limit that output came too late for, found afterwards: a check in time sees a short excess only by
    chance.
    """
    if timeouts.first_token_s is None and timeouts.between_tokens_s is None:
        return None
    times_ns = sorted(t_ns for choice in choices for t_ns in choice.chunk_ns)
    first = [_late_first_token(timeouts, sent_ns, t_ns) for t_ns in times_ns[:1]]
    late = (_late_token(timeouts, before_ns, t_ns) for before_ns, t_ns in pairwise(times_ns))
    return next((error for error in (*first, *late) if error is not None), None)


def _late_connection(exchange: "Exchange", timeouts: Timeouts, now_ns: int) -> RequestError | None:
    is_waiting = exchange.connecting_ns and not exchange.connected_ns
    if not is_waiting or not _is_past(timeouts.connect_s, exchange.connecting_ns, now_ns):
        return None
    return _error("connect-timeout", f"no connection within {timeouts.connect_s:g} s (timeouts.connect_s)")


def _late_first_token(timeouts: Timeouts, sent_ns: int, now_ns: int) -> RequestError | None:
    limit_s = timeouts.first_token_s
    if limit_s is None or not _is_past(limit_s, sent_ns, now_ns):
        return None
    return _error("first-token-timeout", f"no token within {limit_s:g} s (timeouts.first_token_s)")


def _late_token(timeouts: Timeouts, before_ns: int, now_ns: int) -> RequestError | None:
    limit_s = timeouts.between_tokens_s
    if limit_s is None or not _is_past(limit_s, before_ns, now_ns):
        return None
    return _error("between-tokens-timeout", f"no further token within {limit_s:g} s (timeouts.between_tokens_s)")


def _is_past(limit_s: float, since_ns: int, now_ns: int) -> bool:
    return now_ns - since_ns > limit_s * NS_PER_S


def _error(kind: str, message: str) -> RequestError:
    return RequestError(kind=kind, message=message)
