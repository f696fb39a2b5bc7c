"""The program's folder, for nodes that do not have it: packed here, unpacked there.

A rank on another node may lack the folder of the script: then the modules beside the script cannot
be imported, and files that it names by relative paths cannot be opened.  When the first rank says
so, the starting process packs the folder, once for each content; ranks unpack it into a folder of
their user's, once for each node and content.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import stat
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rayrpc._transports.ray.local_lease import locked, own_folder
from rayrpc.errors import ConfigError

__all__ = ["Archive", "EXCLUDED", "MAX_BYTES", "is_within", "moved", "pack", "unpack"]

#: names that are never sent
EXCLUDED = (
    *(".git", ".hg", ".svn", "__pycache__", "*.pyc", ".venv", "venv", "node_modules"),
    *(".tox", ".nox", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"),
)
# As much as Ray sends of a ``working_dir``.
MAX_BYTES = 100 << 20
MAX_FILES = 20_000
# Unpacked folders that no rank has used for so long are deleted.
KEPT_SECONDS = 7 * 86400.0
# Descriptors of the folders that this process uses, which are locked for as long as it lives.
_in_use: list[int] = []
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same archive for the same content


@dataclass(frozen=True)
class Archive:
    """A packed folder.

    Args:
        digest (str): of its content.
        data (bytes): a zip file.
    """

    digest: str
    data: bytes


def pack(root: str, excludes: Iterable[str] = ()) -> Archive:
    """Pack a folder.

    Args:
        root: path of the folder.
        excludes: names, or paths relative to it, that are left out; with ``*``, ``?``, ``[a-z]``.

    Returns:
        The archive, the same for the same content.

    Raises:
        ConfigError: there is too much in it; the message names what is largest.
    """
    patterns = (*EXCLUDED, *excludes)
    sizes: Counter[str] = Counter()
    files = []
    for relative, path in _files(root, patterns):
        sizes[relative.partition("/")[0]] += path.stat().st_size
        files.append((relative, path))
        if sizes.total() > 10 * MAX_BYTES or len(files) > MAX_FILES:
            break  # do not look at a whole disk
    if sizes.total() > MAX_BYTES or len(files) > MAX_FILES:
        largest = ", ".join(f"{name} ({size >> 20} MB)" for name, size in sizes.most_common(3))
        raise ConfigError(
            f"a rank is on a host without the program's folder {root}, which is too large to be "
            f"sent there: more than {MAX_BYTES >> 20} MB or {MAX_FILES} files, most of it in "
            f"{largest}. Exclude what the ranks do not need by the setting working_dir_excludes, "
            "name another folder by --working-dir, or put this one on the host."
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for relative, path in files:
            info = zipfile.ZipInfo(relative, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = stat.S_IMODE(path.stat().st_mode) << 16
            archive.writestr(info, path.read_bytes())
    data = buffer.getvalue()
    return Archive(hashlib.sha256(data).hexdigest()[:32], data)


def _files(root: str, patterns: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Yield the regular files of a folder, by their relative paths, in order."""
    for folder, folders, names in os.walk(root):
        above = os.path.relpath(folder, root).replace(os.sep, "/")
        prefix = "" if above == "." else f"{above}/"
        folders[:] = sorted(
            each
            for each in folders
            if not _matches(prefix + each, patterns)
            and not os.path.exists(os.path.join(folder, each, "pyvenv.cfg"))
        )
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not _matches(prefix + name, patterns):
                yield prefix + name, path


def _matches(relative: str, patterns: tuple[str, ...]) -> bool:
    name = relative.rpartition("/")[2]
    return any(fnmatchcase(name, each) or fnmatchcase(relative, each) for each in patterns)


def unpack(archive: Archive) -> str:
    """Unpack a folder, unless this node has it already; return where it is.

    Raises:
        ClusterError: the user can have no folder here; see ``own_folder``.
    """
    parent = own_folder() / "folders"
    parent.mkdir(exist_ok=True)
    folder = parent / archive.digest
    with locked(parent.with_suffix(".lock")):
        if not folder.is_dir():
            _extract(archive, folder)
        os.utime(folder)
        use = os.open(folder, os.O_RDONLY)
        fcntl.flock(use, fcntl.LOCK_SH)
        _in_use.append(use)
        _delete_old(parent)
    return str(folder)


def _extract(archive: Archive, folder: Path) -> None:
    """Write the content of an archive, all of it or nothing."""
    fresh = Path(tempfile.mkdtemp(dir=folder.parent))
    with zipfile.ZipFile(io.BytesIO(archive.data)) as packed:
        for info in packed.infolist():
            path = Path(packed.extract(info, fresh))
            path.chmod(info.external_attr >> 16)
    fresh.rename(folder)


def _delete_old(parent: Path) -> None:
    """Delete the folders that no process uses or has used for long."""
    for folder in parent.iterdir():
        if time.time() - folder.stat().st_mtime < KEPT_SECONDS:
            continue
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def is_within(path: str, root: str) -> bool:
    """Tell whether a path is that of a folder, or of something in it."""
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def moved(path: str, old: str, new: str) -> str:
    """Return a path with a folder's new place for its old one."""
    return new + path[len(old.rstrip(os.sep)) :] if is_within(path, old) else path
