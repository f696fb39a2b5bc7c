"""The timeouts of calls, as users give them."""

from __future__ import annotations

import math

from rayrpc.errors import ConfigError
from rayrpc.options import UNSET_RPC_TIMEOUT, to_seconds

__all__ = ["resolve_timeout"]

# Torch counts timeouts in whole milliseconds; 0 means no timeout.
MIN_TIMEOUT_SECONDS = 0.001


def resolve_timeout(timeout: float, default: float | None) -> float | None:
    """Return a call's timeout in seconds; None: it has none.

    Args:
        timeout: in seconds, as the user gives it: -1 is the default; 0, or less than a
            millisecond, is none, as in torch.
        default: the worker's, in seconds; None: none.

    Raises:
        TypeError: it is no real number.
        ConfigError: it is negative or NaN.
    """
    if type(timeout) is not float:
        timeout = to_seconds(timeout)
    if timeout == UNSET_RPC_TIMEOUT:
        return default
    if not timeout >= 0:
        raise ConfigError(
            f"timeout must be 0 (none) or more seconds, got {timeout}; leave it out for the default"
        )
    return None if timeout < MIN_TIMEOUT_SECONDS or timeout == math.inf else timeout
