"""Certificates with which Ray, and so rayrpc, encrypts between nodes."""

from __future__ import annotations

from pathlib import Path

import trustme

__all__ = ["write_certificate"]


def write_certificate(
    authority: trustme.CA, folder: Path, *hosts: str, name: str = "node"
) -> dict[str, str]:
    """Write a certificate for hosts, with its key and authority.

    Args:
        authority: issues it.
        folder: to write to.
        hosts: addresses that it is good for.
        name: of the files.

    Returns:
        Ray's environment variables that name the files.
    """
    certificate = authority.issue_cert(*hosts)
    paths = [folder / f"{name}.{part}" for part in ("cert", "key", "ca")]
    certificate.cert_chain_pems[0].write_to_path(paths[0])
    certificate.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    return {"RAY_USE_TLS": "1", **dict(zip(names, map(str, paths), strict=True))}
