"""Whether what goes over the network has to be encrypted."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ray_uses_tls"]


def ray_uses_tls(environ: Mapping[str, str]) -> bool:
    """Tell whether Ray encrypts what it sends to other processes, by its own rule.

    Args:
        environ: the environment.
    """
    return environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
