"""The command ``rayrpc``."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import traceback
from collections.abc import Sequence

import yaml

from rayrpc import __version__, config
from rayrpc.errors import ConfigError, RpcError

__all__ = ["main"]

# After Ctrl-C, a process that has not ended by itself in this time is ended.
EXIT_SECONDS = 5.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rayrpc", description="torch.distributed.rpc programs on a Ray cluster."
    )
    parser.add_argument("--version", action="version", version=f"rayrpc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run an unmodified script on Ray",
        description="Run a script as python would, with rayrpc in the place of "
        "torch.distributed.rpc; ranks that it spawns become Ray actors.",
    )
    run.add_argument("--address", help="the Ray cluster: host:port, auto, ray://..., or local")
    run.add_argument("--config", metavar="FILE", help="settings in YAML")
    run.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one setting, its value in YAML; repeatable",
    )
    run.add_argument("script", metavar="SCRIPT", help="the script")
    run.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _settings(options: argparse.Namespace) -> config.Settings:
    overrides = {}
    for item in options.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: write it as KEY=VALUE")
        overrides[key.replace("-", "_")] = yaml.safe_load(value)
    if options.address is not None:
        overrides["address"] = options.address
    return config.load(options.config, **overrides)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv (list[str], optional): the arguments; default: the process's.

    Returns:
        The exit status: 0, the script's own, 1 after an exception, 2 for a command line or
        settings that are not valid, 130 after Ctrl-C.

    Raises:
        SystemExit: by argparse, for ``--help``, ``--version`` and unknown arguments.
    """
    options = _parser().parse_args(argv)
    try:
        settings = _settings(options)
    except RpcError as exc:
        print(f"rayrpc: {exc}", file=sys.stderr)
        return 2
    if not os.path.isfile(options.script):
        print(f"rayrpc: there is no script {options.script}", file=sys.stderr)
        return 2
    # here, because they load torch and Ray
    from rayrpc import compat
    from rayrpc.launch.process import Shim
    from rayrpc.launch.program import run_as_main
    from rayrpc.launch.spawning import start_processes

    Shim(settings.to_dict(), compat.install, start_processes).enter()
    try:
        run_as_main(options.script, options.args)
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return exc.code or 0
        print(exc.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # the interpreter's own exit may wait for threads that never end
        exit_timer = threading.Timer(EXIT_SECONDS, os._exit, (130,))
        exit_timer.daemon = True
        exit_timer.start()
        return 130
    except BaseException as exc:
        # leave out our own frames: start at the script's
        trace = exc.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != options.script:
            trace = trace.tb_next
        traceback.print_exception(type(exc), exc, trace or exc.__traceback__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
