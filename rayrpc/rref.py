"""``RRef`` and its proxies, under the names of ``torch.distributed.rpc``."""

from __future__ import annotations

from rayrpc._runtime.rrefs.handle import PyRRef, RRef
from rayrpc._runtime.rrefs.proxy import RRefProxy

__all__ = ["PyRRef", "RRef", "RRefProxy"]
