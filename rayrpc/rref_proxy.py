"""``RRef`` and its proxies, under the names of ``torch.distributed.rpc``."""

from __future__ import annotations

from rayrpc._runtime.rrefs.handle import PyRRef, RRef
from rayrpc._runtime.rrefs.proxy import (  # noqa: F401  torch's rref_proxy has the last two
    RRefProxy,
    _local_invoke,
    _local_invoke_async_execution,
)

__all__ = ["PyRRef", "RRef", "RRefProxy"]
