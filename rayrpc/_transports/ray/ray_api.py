"""Ray's functions, which here are errors where Ray has ended.

The functions of the same names in ``ray`` start Ray again: a thread that outlives
``ray.shutdown()`` would start a cluster that nobody wants, and wait for an answer there.
"""

from ray._private.worker import get, get_actor, wait

__all__ = ["get", "get_actor", "wait"]
