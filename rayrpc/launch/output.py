"""Show what workers print, in the process that started them.

worker's process        its node                            driver
  Capture ──pipes──> Collector ──────────────────────────> Display    on the driver's node
  Capture ──pipes──> Collector in an OutputRelay ──read──> Display    on another node
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.waiting import Notifier
from rayrpc._transports.ray import ray_api
from rayrpc.config import Settings
from rayrpc.launch.collector import Collector
from rayrpc.launch.display import BEGIN, END, STACKS_SHOWN, STATUS, Display, Text
from rayrpc.launch.line_prefixes import line_prefixes
from rayrpc.launch.log_files import LogFiles
from rayrpc.launch.notebook import NotebookDisplay, has_kernel
from rayrpc.launch.output_relay import CONCURRENCY_GROUPS, OutputRelay
from rayrpc.launch.placement import this_node

__all__ = ["Output", "show_stacks"]

# Without any text for so long, workers that were ended are taken for ended.
STALL_SECONDS = 5.0
RELAY_SECONDS = 60.0  # to start the actor on another node
STEP_SECONDS = 0.5  # at most, until Python can handle a Ctrl-C

_opened: weakref.WeakSet[Output] = weakref.WeakSet()


class Output:
    """What some workers print.

    Args:
        actors (dict[str, ActorHandle]): by worker.
        settings (Settings): say what is shown, how, and what is kept.
        prefixed (bool): lines have prefixes, unless the settings say otherwise.
    """

    def __init__(
        self, actors: Mapping[str, ActorHandle[Any]], settings: Settings, prefixed: bool = False
    ) -> None:
        self._display: Display | NotebookDisplay | None = None
        self._files = LogFiles(settings.log_dir) if settings.log_dir else None
        self._display_lock = threading.Lock()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = Notifier()
        self._noted: dict[bytes | None, set[str]] = {BEGIN: set(), END: set(), STACKS_SHOWN: set()}
        #: by worker, what it has given to ``os._exit``
        self.exit_statuses: dict[str, int] = {}
        self._showing = 0
        self._shown_at = time.monotonic()
        self._collector: Collector | None = None
        self._relays: list[Any] = []
        #: by worker, what its ``Capture`` needs
        self.addresses: dict[str, str] = {}
        if settings.log_to_terminal or self._files is not None:
            nodes = _nodes_of(actors)
            prefixes = {}
            if settings.log_to_terminal:
                prefixes = line_prefixes(_hosts_of(nodes), settings, prefixed)
                self._display = NotebookDisplay(prefixes) if has_kernel() else Display(prefixes)
            self._open(nodes, by_line=bool(prefixes))
            _opened.add(self)

    @property
    def takes_marks(self) -> bool:
        """Whether workers may mark for which cell each text is."""
        return isinstance(self._display, NotebookDisplay)

    def _open(self, nodes: Mapping[str, str], by_line: bool) -> None:
        collectors: dict[str, str] = {}
        here = this_node()
        counts = Counter(nodes.values())
        if here in counts:
            self._collector = Collector(self._show, by_line, counts.pop(here))
            collectors[here] = self._collector.address
        relays = {node: self._start_relay(node, by_line, count) for node, count in counts.items()}
        for node, relay in relays.items():
            collectors[node] = ray.get(relay.address.remote(), timeout=RELAY_SECONDS)
            workers = [worker for worker in nodes if nodes[worker] == node]
            threading.Thread(
                target=self._read, args=(relay, workers), name="rayrpc-output", daemon=True
            ).start()
        self.addresses.update({worker: collectors[node] for worker, node in nodes.items()})

    def _start_relay(self, node: str, by_line: bool, count: int) -> Any:
        remote: Any = ray.remote
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        relay = (
            remote(concurrency_groups=CONCURRENCY_GROUPS)(OutputRelay)
            .options(num_cpus=0, scheduling_strategy=affinity(node, soft=False))
            .remote(by_line, count)
        )
        self._relays.append(relay)
        return relay

    def _read(self, relay: Any, workers: list[str]) -> None:
        """Show what a relay collects, until it ends."""
        with contextlib.suppress(Exception, SystemExit):  # it was ended, or its node is lost
            while True:
                self._show([Text(*text) for text in ray_api.get(relay.read.remote())])
        self._show([Text(worker, 0, END) for worker in workers])

    def _show(self, texts: list[Text]) -> None:
        with self._lock:
            self._showing += 1
        with self._display_lock:
            if isinstance(self._display, NotebookDisplay):
                texts = self._display.show(texts)
            elif self._display is not None:
                self._display.show(texts)
            if self._files is not None:
                self._files.write(texts)
        with self._lock:
            self._showing -= 1
            self._shown_at = time.monotonic()
            for worker, fd, note in texts:
                if fd == STATUS and note is not None:
                    self.exit_statuses[worker] = int(note)
                elif fd == 0:
                    self._noted[note].add(worker)
        self._changed.notify_all()

    def _wait(self, note: bytes, workers: Iterable[str], deadline: Deadline) -> None:
        """Wait until all of some workers that have begun have a note."""
        wanted = set(workers)

        def has_ended() -> bool:
            with self._lock:
                lacking = wanted & self._noted[BEGIN] - self._noted[note] - self._noted[END]
                is_stalled = time.monotonic() - self._shown_at > STALL_SECONDS
                return not lacking or (is_stalled and not self._showing)

        while not deadline.expired:
            if self._changed.wait_until(has_ended, deadline.within(STEP_SECONDS)):
                return

    # -- the end ------------------------------------------------------------------------------

    def wait_ended(self, workers: Iterable[str], timeout: float | None = None) -> None:
        """Wait until all is shown that workers have printed, which have ended or are ending.

        A worker whose children keep its output open is waited for 2 s.

        Args:
            workers (list[str]): names; those that never printed through this are ignored.
            timeout (float, optional): in seconds; None: as long as the terminal takes.
        """
        if os.getpid() == self._pid:  # a forked child has not this one's threads
            deadline = Deadline(timeout)
            self._shown_at = time.monotonic()
            self._wait(END, workers, deadline)

    def show_stacks(self, workers: Iterable[str], timeout: float) -> None:
        """Have workers write where they are, and wait until that is shown.

        Args:
            workers (list[str]): names.
            timeout (float): in seconds.
        """
        if os.getpid() != self._pid:
            return
        deadline = Deadline(timeout)
        if self._collector is not None:
            self._collector.ask_stacks()
        for relay in self._relays:
            relay.ask_stacks.remote()
        self._wait(STACKS_SHOWN, workers, deadline)

    def close(self, timeout: float | None = None) -> None:
        """Show what is left, and stop; later calls do nothing.

        Args:
            timeout (float, optional): for ``wait_ended``.
        """
        if os.getpid() != self._pid:
            return
        self.wait_ended(self.addresses, timeout)
        _opened.discard(self)
        collector, self._collector = self._collector, None
        if collector is not None:
            collector.close(STEP_SECONDS)
        relays, self._relays = self._relays, []
        if ray.is_initialized():
            for relay in relays:
                ray.kill(relay)
        if self._files is not None:
            with self._display_lock:
                self._files.close()


def _nodes_of(actors: Mapping[str, ActorHandle[Any]]) -> dict[str, str]:
    """Return the ids of workers' nodes."""
    return dict(
        zip(actors, ray.get([each.node_id.remote() for each in actors.values()]), strict=True)
    )


def _hosts_of(nodes: Mapping[str, str]) -> dict[str, str]:
    """Return the names of workers' hosts; where all are on one node, Ray is not asked."""
    if len(set(nodes.values())) == 1:
        return dict(nodes)
    names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
    return {worker: names.get(node, node) for worker, node in nodes.items()}


def show_stacks(timeout: float) -> None:
    """Have all workers that this process started write where they are.

    Args:
        timeout: in seconds.
    """
    deadline = Deadline(timeout)
    for output in list(_opened):
        output.show_stacks(output.addresses, deadline.remaining() or 0)
