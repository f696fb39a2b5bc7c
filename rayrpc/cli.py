"""The command ``rayrpc``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from rayrpc import __version__, config
from rayrpc.errors import ConfigError, RpcError

__all__ = ["main"]

STACKS_SECONDS = 1.8  # after a Ctrl-C, for workers to write where they are
RATE_SECONDS = 0.5  # in which `rayrpc status` counts calls
NO_GROUP = "no group runs on the cluster"
TORCHRUN = "torch.distributed.run"
CLEAR = "\x1b[H\x1b[2J"  # a terminal's screen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rayrpc", description="torch.distributed.rpc programs on a Ray cluster."
    )
    parser.add_argument("--version", action="version", version=f"rayrpc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run an unmodified script on Ray",
        usage="%(prog)s [-h] [--address ADDRESS] [--config FILE] [--set KEY=VALUE] "
        "[--nproc-per-node N] [--working-dir FOLDER] [--log-dir FOLDER] [--trace FILE] "
        "(SCRIPT | -m MODULE) ARGS ...",
        description="Run a script, a module or a Python command (torchrun) as python would, with "
        "rayrpc in the place of torch.distributed.rpc; ranks that it spawns become Ray actors.",
    )
    _add_settings(run)
    run.add_argument(
        "--nproc-per-node",
        metavar="N",
        help="run the program in so many processes, each with a RANK, by torchrun",
    )
    run.add_argument(
        "--working-dir",
        metavar="FOLDER",
        help="sent to hosts that do not have it (default: the script's folder)",
    )
    run.add_argument(
        "--log-dir", metavar="FOLDER", help="keep what each rank prints in a file there"
    )
    run.add_argument(
        "--trace",
        metavar="FILE",
        help="record the calls of all workers, and write them for Perfetto at the end",
    )
    run.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="the module"
    )
    run.add_argument("script", metavar="SCRIPT", nargs="?", help="the script")
    run.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    status = commands.add_parser(
        "status",
        help="show the groups on a cluster, their workers, and the calls that wait",
        description="Show the groups on a cluster, their workers, and the calls that wait for "
        "their replies. Without an address, on the local cluster of the programs that run here.",
    )
    status.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=float,
        const=2.0,
        help="show it again, every 2 s if no number is given, until Ctrl-C",
    )
    stack = commands.add_parser(
        "stack",
        help="show where the code of all workers is, and which call waits for which",
        description="Show where the code of all workers is, which call waits for which, and "
        "deadlocks. The cluster is found as by `rayrpc status`.",
    )
    stack.add_argument("worker", metavar="WORKER", nargs="?", help="show this one's code only")
    up = commands.add_parser(
        "up",
        help="keep a local cluster between programs, with torch loaded for their workers",
        description="Start a local cluster, and load torch for workers, so that programs on it "
        "start faster. It ends by `rayrpc down`, or when no program has used it for the setting "
        "idle_timeout.",
    )
    down = commands.add_parser(
        "down",
        help="end what `rayrpc up` keeps",
        description="End what `rayrpc up` keeps; if programs use it, when these have ended.",
    )
    stop = commands.add_parser(
        "stop",
        help="end the workers of a group that outlive their program",
        description="End the workers of a group that are actors, such as those that a program has "
        "started with detached=True. The cluster is found as by `rayrpc status`.",
    )
    stop.add_argument("group", metavar="GROUP", help="the group's name")
    for command in (status, stack, up, down, stop):
        _add_settings(command)
    for command in (status, stack):
        command.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--address", help="the Ray cluster: host:port, auto, ray://..., or local")
    command.add_argument("--config", metavar="FILE", help="settings in YAML")
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one setting, its value in YAML; repeatable",
    )


def _settings(options: argparse.Namespace) -> config.Settings:
    overrides = {}
    for item in options.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: write it as KEY=VALUE")
        try:
            overrides[key.replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as exc:
            problem = " ".join(str(exc).split())
            raise ConfigError(f"--set {item}: the value is not valid YAML: {problem}") from None
    if options.address is not None:
        overrides["address"] = options.address
    if getattr(options, "working_dir", None) is not None:
        overrides["working_dir"] = options.working_dir
    if getattr(options, "log_dir", None) is not None:
        overrides["log_dir"] = os.path.abspath(options.log_dir)  # the program may change its folder
    return config.load(options.config, **overrides)


def _find_by_torchrun(processes: str, program: list[str]) -> tuple[str, list[str]]:
    options = ["--standalone", f"--nproc-per-node={processes}"]
    return TORCHRUN, [*options, *program]


def _find_program(options: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the path of the script, or the name of the module, and its arguments.

    Raises:
        ConfigError: there is none.
    """
    if options.module is not None:
        if not options.module:
            raise ConfigError("-m: name a module")
        if options.nproc_per_node is not None:
            return _find_by_torchrun(options.nproc_per_node, ["-m", *options.module])
        name, *arguments = options.module
        sys.path[0] = os.getcwd()
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ConfigError(f"there is no module {name}")
        return name, arguments
    if options.script is None:
        raise ConfigError("name a script, or a module by -m")
    if options.nproc_per_node is not None:
        return _find_by_torchrun(options.nproc_per_node, [options.script, *options.args])
    if os.path.isfile(options.script):
        return options.script, options.args
    command = shutil.which(options.script)
    if command is None:
        raise ConfigError(f"there is no script {options.script}")
    with open(command, "rb") as file:  # some systems have a line for the shell before
        if b"python" not in file.readline(1000) + file.readline(1000):
            raise ConfigError(f"{options.script} is no script or command in Python")
    return command, options.args


def _show(options: argparse.Namespace, settings: config.Settings) -> int:
    """Print the state of the groups on a cluster; return the exit status.

    Raises:
        ClusterError: no cluster can be reached.
    """
    from rayrpc.launch.looking import elsewhere, look, rays_commands  # loads Ray

    with contextlib.suppress(KeyboardInterrupt):
        if options.json:
            groups = look(settings, options.command == "stack")
            print(json.dumps([group.to_dict() for group in groups], indent=1))
        elif options.command == "stack":
            groups = look(settings, True)
            print("\n\n".join(group.stacks(options.worker) for group in groups) or NO_GROUP)
        else:
            _show_status(lambda: look(settings, False), options.watch)
            print(f"\n{rays_commands()}")
        if not options.json and (others := elsewhere(settings)):
            print(others)
    return 0


def _show_status(look: Callable[[], list[Any]], interval: float | None) -> None:
    """Print the state of groups, with the calls a second, once or every ``interval`` seconds."""
    groups = look()
    while True:
        time.sleep(interval or RATE_SECONDS)
        before = {group.key: group for group in groups}
        groups = look()
        text = "\n\n".join(group.text(before.get(group.key)) for group in groups) or NO_GROUP
        print(CLEAR + text if interval and sys.stdout.isatty() else text, flush=True)
        if not interval:
            return


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
        if options.command in ("up", "down"):
            from rayrpc.launch import up  # loads Ray

            print(getattr(up, options.command)(settings))
            return 0
        if options.command == "stop":
            from rayrpc.launch.detached import stop_group  # loads Ray

            print(stop_group(settings, options.group))
            return 0
        if options.command != "run":
            return _show(options, settings)
        name, arguments = _find_program(options)
    except RpcError as exc:
        print(f"rayrpc: {exc}", file=sys.stderr)
        return 2
    if not options.module and name != TORCHRUN:
        from rayrpc.launch.ahead import start_for_script

        start_for_script(name, settings)
    # here, because they load torch and Ray
    from rayrpc import compat
    from rayrpc._transports.ray.cluster import shut_down_at_exit
    from rayrpc.launch.interrupt import exit_in_time
    from rayrpc.launch.output import show_stacks
    from rayrpc.launch.process import Shim
    from rayrpc.launch.program import OUR_FILES, run_as_main, run_module_as_main
    from rayrpc.launch.spawning import start_processes

    shut_down_at_exit()
    try:
        if options.trace:
            from rayrpc.launch.run_trace import trace_run

            trace_run(settings, options.trace)
    except RpcError as exc:
        print(f"rayrpc: {exc}", file=sys.stderr)
        return 1
    Shim(settings.to_dict(), compat.install, start_processes).enter()
    try:
        is_module = options.module or name == TORCHRUN
        (run_module_as_main if is_module else run_as_main)(name, arguments)
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return exc.code or 0
        print(exc.code, file=sys.stderr)
        return 1
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt):
            exit_in_time()
            show_stacks(STACKS_SECONDS)
        # leave out our own frames: start at the program's
        trace = exc.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in OUR_FILES:
            trace = trace.tb_next
        traceback.print_exception(type(exc), exc, trace or exc.__traceback__)
        return 130 if isinstance(exc, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
