"""Ray's authentication by token: this user's token, and the clusters that require one.

Ray takes a token from ``RAY_AUTH_TOKEN``, else from the file ``RAY_AUTH_TOKEN_PATH``, else from
``~/.ray/auth_token``, and sends it if ``RAY_AUTH_MODE`` is ``token``.  A client that does not is
refused by a cluster that requires one; one that does cannot create actors on a cluster that
requires none.  So a cluster is asked before Ray connects.

Source: Ray, "Ray token authentication".
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayrpc.errors import ClusterError

__all__ = ["enable", "enable_if_needed", "make_private"]

PROBE_SECONDS = 5.0
ADVICE = (
    "Set RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to the path of its file."
)


def enable() -> None:
    """Have Ray authenticate by the token in this process and its children."""
    os.environ["RAY_AUTH_MODE"] = "token"
    with contextlib.suppress(ImportError):  # a version of Ray without tokens
        from ray._private.authentication import authentication_token_setup

        # Ray reads the environment when it is imported, which may have been before
        authentication_token_setup._enable_token_auth()


def enable_if_needed(address: str) -> None:
    """Have Ray authenticate by the token if a cluster requires it.

    ``RAY_AUTH_MODE`` is not changed if it is set.

    Args:
        address: the cluster's, ``host:port``; nothing happens for others, such as ``ray://...``.

    Raises:
        ClusterError: the cluster requires a token, and there is none, or another one.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    # not by Ray's own loader: after it was asked, actors cannot wait for ObjectRefs
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN")) or _path().exists()
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode == "token" and not has_token:  # Ray would abort the process
        raise ClusterError(f"RAY_AUTH_MODE is 'token', and this user has no token. {ADVICE}")
    if not _is_reachable(host.strip("[]"), int(port)) or _accepts(address):
        return
    required = f"the Ray cluster at {address} requires a token"
    if not has_token:
        raise ClusterError(f"{required}, and this user has none. {ADVICE}")
    if mode is None:
        enable()
    elif mode != "token":
        raise ClusterError(f"{required}, and RAY_AUTH_MODE is {mode!r}. Unset it.")
    if not _accepts(address):
        place = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else _path()
        raise ClusterError(f"{required}, and refuses that in {place}. {ADVICE}")


def _is_reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _accepts(address: str) -> bool:
    """Tell whether a cluster accepts this process with the token that it sends, or none."""
    from ray import _raylet, exceptions

    raylet: Any = _raylet
    refused = getattr(exceptions, "AuthenticationError", ())  # not in older versions
    with _without_warning():
        try:
            raylet.GcsClient(address=address)
        except refused:
            return False
        except exceptions.RayError:  # it does not answer: ray.init() raises the error
            pass
    return True


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """Leave out what Ray's C++ code writes to stderr where a cluster refuses a client."""
    try:
        saved = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            for line in file:  # other threads may write, too
                if b"gcs_client.cc" not in line:
                    os.write(2, line)


def _path() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def make_private() -> None:
    """Have the token, made here if it is missing, be readable by nobody else.

    Ray makes it with the rights that the umask leaves to others.

    Raises:
        ClusterError: its file cannot be written.
    """
    if "RAY_AUTH_TOKEN" in os.environ:
        return
    path = _path()
    try:
        if not path.exists():
            _make_token(path)
        found = path.stat()  # a link in the user's own folder is the user's
        if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(0o600)
    except OSError as exc:
        raise ClusterError(
            f"Ray's token of this user cannot be made: {exc}. Set RAY_AUTH_TOKEN to a text that "
            "is hard to guess, or RAY_AUTH_TOKEN_PATH to the path of a file of your own."
        ) from exc


def _make_token(path: Path) -> None:
    """Write a new token, whole or not at all; keep one that another process writes meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, written = tempfile.mkstemp(dir=path.parent)  # for the user alone
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(written, path)
    finally:
        os.unlink(written)
