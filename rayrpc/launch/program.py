"""The program that a rank runs: the script of the process that starts it, loaded elsewhere.

A rank loads the script the way ``multiprocessing`` does: as the module ``__mp_main__``, which is
``__main__`` there too.  So its functions pickle by reference in all ranks, and what follows
``if __name__ == "__main__"`` runs once, in the process that starts them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import linecache
import os
import runpy
import sys
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rayrpc._protocol.origin import Origin
from rayrpc._transports import process_origin
from rayrpc.errors import ConfigError
from rayrpc.launch.children import without_folder
from rayrpc.launch.folder import is_within, moved

__all__ = ["OUR_FILES", "Program", "run_as_main", "run_module_as_main"]

#: the files whose frames are between the command line and a program
OUR_FILES = (str(Path(__file__).parents[1] / "cli.py"), __file__, runpy.__file__, "<frozen runpy>")

# Prefixes of variables that Ray set in this process, or that belong to one machine alone.
_NOT_SENT = ("RAY_", "RAYRPC_INTERNAL_")
# ... but this one is the run's: see ``launch.run_trace``
_SENT = "RAYRPC_INTERNAL_TRACE"


def _environ() -> dict[str, str]:
    """Return the environment, without what ``launch.process`` adds for children."""
    environ = dict(os.environ)
    if path := without_folder(environ.pop("PYTHONPATH", "")):
        environ["PYTHONPATH"] = path
    return environ


# Read when the module is imported, which is before the script runs: only a copy from that time
# shows which variables the script changed.
_environ_at_start = _environ()


@dataclass(frozen=True)
class Program:
    """What a process runs, in a form that another can load.

    Args:
        path (str): of the script; empty if there is none (a notebook, a console).
        module (str): name of the module that ``python -m`` runs; empty if none.
        source (bytes): the script's text, for nodes that do not have the file.
        argv (list[str]): ``sys.argv`` of the process.
        sys_path (list[str]): its ``sys.path``.
        cwd (str): its working directory; empty: ranks stay in their own.
        environ (dict[str, str]): its environment.
        changed (frozenset[str]): names in it that the process itself changed.
        origin (Origin, optional): of the hosted workers that the process starts.
        folder (str): what its modules and files are in, for nodes that do not have it; empty: it
            is not sent.
    """

    path: str = ""
    module: str = ""
    source: bytes = b""
    argv: list[str] = field(default_factory=list)
    sys_path: list[str] = field(default_factory=list)
    cwd: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    origin: Origin | None = None
    folder: str = ""

    @staticmethod
    def of_this_process(working_dir: str | None = None) -> Program:
        """Describe what this process runs.

        Args:
            working_dir (str, optional): its folder; None: that of the script, or the working
                directory of ``python -m``.

        Returns:
            Program: with the environment less what belongs to Ray or to this machine.

        Raises:
            ConfigError: there is no such folder.
        """
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module = "" if spec is None or spec.name == "__main__" else spec.name
        path = "" if module else getattr(main, "__file__", None) or ""
        if path and not Path(path).is_file():
            path = ""
        environ = {k: v for k, v in _environ().items() if k == _SENT or not k.startswith(_NOT_SENT)}
        return Program(
            path=os.path.abspath(path) if path else "",
            module=module,
            source=Path(path).read_bytes() if path else b"",
            argv=list(sys.argv),
            sys_path=[p or os.getcwd() for p in sys.path],
            cwd=os.getcwd(),
            environ=environ,
            changed=frozenset(k for k, v in environ.items() if _environ_at_start.get(k) != v),
            origin=process_origin.origin_of_ranks(),
            folder=_folder(working_dir, path, module),
        )

    @staticmethod
    def without_script(working_dir: str | None = None) -> Program:
        """Describe where this process runs, for workers that only serve.

        Args:
            working_dir (str, optional): see ``of_this_process``.

        Returns:
            Program: with this process's ``sys.path``, environment and folder alone.
        """
        here = Program.of_this_process(working_dir)
        return Program(
            sys_path=here.sys_path, environ=here.environ, origin=here.origin, folder=here.folder
        )

    @property
    def lacks_folder(self) -> bool:
        """Tell whether this node has no folder of the program, or another version of its script."""
        if not self.folder or not os.path.isdir(self.folder):
            return bool(self.folder)
        if not self.path or not is_within(self.path, self.folder):
            return False
        try:
            return Path(self.path).read_bytes() != self.source
        except OSError:
            return True

    def move(self, folder: str) -> Program:
        """Use another folder in place of the program's, after ``enter``.

        Args:
            folder (str): with the same content.

        Returns:
            Program: in that folder.
        """

        def new(path: str) -> str:
            return moved(path, self.folder, folder)

        sys.path[:] = [new(each) for each in sys.path]
        sys.argv[:1] = [new(each) for each in sys.argv[:1]]
        if path := os.environ.get("PYTHONPATH"):
            os.environ["PYTHONPATH"] = os.pathsep.join(map(new, path.split(os.pathsep)))
        if self.cwd and (is_within(self.cwd, self.folder) or not os.path.isdir(self.cwd)):
            cwd = new(self.cwd)
            os.chdir(cwd if os.path.isdir(cwd) else folder)
        return dataclasses.replace(self, path=new(self.path), folder=folder)

    def enter(self, same_node: bool, kept: Collection[str] = ()) -> None:
        """Give this process the environment and origin of the program; before torch is imported.

        Args:
            same_node (bool): this process is on the node of the described one.  On another node,
                only variables that are missing there, or that the program changed, are set.
            kept: names of variables that this process keeps as they are.
        """
        for name, value in self.environ.items():
            if name in kept:
                continue
            if same_node or name in self.changed or name not in os.environ:
                os.environ[name] = value
        if "OMP_NUM_THREADS" not in self.environ:
            # Ray sets it to 1 for actors that ask for no CPU; a plain process has torch's default
            os.environ.pop("OMP_NUM_THREADS", None)
        known = set(sys.path)
        sys.path[:0] = [p for p in self.sys_path if p not in known]
        if os.path.isdir(self.cwd):
            os.chdir(self.cwd)
        sys.argv[:] = self.argv
        if self.origin is not None:
            process_origin.enter(self.origin)

    def load(self) -> None:
        """Load the program as ``__mp_main__``, which is ``__main__`` from then on.

        Raises:
            Exception: whatever the program's own lines raise.
        """
        if self.module:
            _set_main(_run_module(self.module))
        elif self.path:
            code = _code(self.path, self.source)
            main = types.ModuleType("__mp_main__")
            main.__file__ = self.path
            _set_main(main)
            exec(code, main.__dict__)


def _folder(working_dir: str | None, path: str, module: str) -> str:
    """Return what folder a program is in; empty if its modules are installed, or it has none."""
    if working_dir is not None:
        folder = os.path.abspath(os.path.expanduser(working_dir))
        if not os.path.isdir(folder):
            raise ConfigError(f"working_dir: there is no folder {folder}")
        return folder
    if module:
        return os.getcwd()
    folder = os.path.dirname(os.path.abspath(path)) if path else ""
    is_installed = any(is_within(folder, each) for each in (sys.prefix, sys.base_prefix))
    return "" if is_installed else folder


def _set_main(main: types.ModuleType) -> None:
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main


def _run_module(name: str) -> types.ModuleType:
    main = types.ModuleType("__mp_main__")
    main.__dict__.update(runpy.run_module(name, run_name="__mp_main__", alter_sys=True))
    return main


def _code(path: str, source: bytes) -> types.CodeType:
    if not os.path.exists(path):
        lines = importlib.util.decode_source(source).splitlines(keepends=True)
        linecache.cache[path] = (len(source), None, lines, path)  # for tracebacks
    return compile(source, path, "exec", dont_inherit=True)


def run_module_as_main(name: str, argv: list[str]) -> None:
    """Run a module as ``python -m name argv`` would, in this process.

    Args:
        name (str): of the module, or of a package with a ``__main__``.
        argv (list[str]): its arguments.

    Raises:
        ImportError: there is no such module.
        BaseException: whatever the module raises, ``SystemExit`` included.
    """
    sys.argv[1:] = argv
    sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_as_main(path: str, argv: list[str], environ: Mapping[str, str] | None = None) -> None:
    """Run a script as ``python path argv`` would, in this process.

    Args:
        path (str): of the script.
        argv (list[str]): its arguments.
        environ (dict[str, str], optional): added to the environment.

    Raises:
        FileNotFoundError: there is no such script.
        BaseException: whatever the script raises, ``SystemExit`` included.
    """
    os.environ.update(environ or {})
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no script {path}")
    sys.argv[:] = [path, *argv]
    sys.path[0] = str(file.resolve().parent)
    main = types.ModuleType("__main__")
    main.__file__ = str(file)
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    _set_main(main)
    exec(_code(str(file), file.read_bytes()), main.__dict__)
