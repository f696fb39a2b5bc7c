"""A profile of all calls that this worker serves, whoever calls.

torch's ``_server_process_global_profile`` is a subclass of the legacy profiler, which enables and
disables such a profile by two native functions; these are in their place.  Several may be on: a
call belongs to all that were on when it began, and is recorded with the options of the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from rayrpc._runtime import current

__all__ = ["_disable_server_process_global_profiler", "_enable_server_process_global_profiler"]

_autograd: Any = torch.autograd


class _Profile(NamedTuple):
    """A profile that is on.

    Args:
        config: of torch's profiler.
        records: of each call.
    """

    config: Any
    records: list[Any]


_profiles: list[_Profile] = []


def _enable_server_process_global_profiler(config: Any) -> None:
    """Begin to record the calls that this worker serves.

    Args:
        config (ProfilerConfig): of the profile.

    Raises:
        RuntimeError: RPC is not initialized.

    Source: ``torch.distributed.rpc``'s function of this name.
    """
    around = current.get_agent().callee.around
    _profiles.append(_Profile(config, []))
    if _recorded not in around:
        around.append(_recorded)


def _disable_server_process_global_profiler() -> list[Any]:
    """End the profile that was begun last.

    Returns:
        The records of each call.

    Raises:
        RuntimeError: none is on, or RPC is not initialized.

    Source: ``torch.distributed.rpc``'s function of this name.
    """
    if not _profiles:
        raise RuntimeError("no profile of the calls that this worker serves is on")
    profile = _profiles.pop()
    if not _profiles:
        current.get_agent().callee.around.remove(_recorded)
    return profile.records


@contextlib.contextmanager
def _recorded(invocation: object) -> Iterator[None]:
    profiles = list(_profiles)
    if not profiles or _autograd._profiler_enabled():  # the caller has the call recorded
        yield
        return
    _autograd._enable_profiler_legacy(profiles[-1].config)
    try:
        yield
    finally:
        records = _autograd._disable_profiler_legacy()
        for profile in profiles:
            profile.records.append(records)
