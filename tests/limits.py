"""Limits of this process, for the length of a block."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

__all__ = ["no_descriptors"]


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no more files and sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.open(os.devnull, os.O_RDONLY)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
