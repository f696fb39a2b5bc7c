"""What ``pyproject.toml`` has: the project's addresses, and the files that they lead to."""

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["PYPROJECT", "URLS", "local_path"]

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
URLS: dict[str, str] = PYPROJECT["project"]["urls"]


def local_path(url: str) -> str | None:
    """Return the file of the repository that an address leads to; None: it is another's.

    Args:
        url: an address, without its anchor.
    """
    repository, site = URLS["Repository"], URLS["Documentation"]
    raw = repository.replace("https://github.com/", "https://raw.githubusercontent.com/")
    for start in (f"{repository}/blob/main/", f"{repository}/tree/main/", f"{raw}/main/"):
        if url.startswith(start):
            return url.removeprefix(start)
    if url.startswith(site):
        page = url.removeprefix(site).removesuffix(".html") or "index"
        return f"docs/{page}.md"
    return None
