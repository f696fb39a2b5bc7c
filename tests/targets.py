"""Functions and classes that tests call on workers; importable there by name."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

import rayrpc as rpc

counter = 0
shared: dict[str, Any] = {}


def count() -> int:
    global counter
    counter += 1
    return counter


def whoami() -> str:
    return rpc.get_worker_info().name


def pid() -> int:
    return os.getpid()


def threads() -> int:
    return torch.get_num_threads()


def add(x: Any, y: Any = 1) -> Any:
    return x + y


def identity(x: Any) -> Any:
    return x


def nap(seconds: float, result: Any = None) -> Any:
    time.sleep(seconds)
    return result


def fail(text: str = "as expected") -> None:
    raise ValueError(text)


class Picky(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def fail_picky() -> None:
    raise Picky(3, "picky error")


def leave_thread() -> None:
    raise SystemExit(3)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def call_on(to: str, func: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, func, args=args)


@rpc.functions.async_execution
def chained(to: str, x: Any, y: Any, z: Any) -> Any:
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: fut.wait() + z)


@rpc.functions.async_execution
def wait_for_all(number: int) -> Any:
    """Complete when ``number`` callers have come, holding no thread for any of them."""
    waiting = shared.setdefault("waiting", [])
    future: Any = torch.futures.Future()
    waiting.append(future)
    if len(waiting) == number:
        for each in waiting:
            each.set_result(number)
        waiting.clear()
    return future


@rpc.functions.async_execution
def wait_on(to: str) -> Any:
    """Complete when a call that never ends does."""
    return rpc.rpc_async(to, hang, timeout=0)


_hanging: list[int] = []


def hang() -> None:
    """Never return."""
    _hanging.append(threading.get_ident())
    threading.Event().wait()


def hanging() -> int:
    """Return how many calls hang here."""
    return len(_hanging)


def hang_on(to: str) -> None:
    rpc.rpc_sync(to, hang, timeout=0)


def waiting() -> int:
    """Return how many calls of ``wait_for_all`` wait for others here."""
    return len(shared.get("waiting", ()))


@rpc.functions.async_execution
def no_future() -> int:
    return 1


def plain_future() -> Any:
    return torch.futures.Future()


def keep(name: str, value: Any) -> None:
    shared[name] = value


def kept(name: str) -> Any:
    return shared[name]


def wait_until_kept(name: str) -> None:
    """Return once ``name`` is kept here; fail after a minute."""
    end = time.monotonic() + 60
    while name not in shared:
        if time.monotonic() > end:
            raise TimeoutError(name)
        time.sleep(0.01)


def drop(name: str) -> None:
    shared.pop(name, None)


def read(rref: Any) -> Any:
    return rref.to_here()


def is_confirmed(rref: Any) -> bool:
    return rref.confirmed_by_owner()


def rref_info() -> dict[str, str]:
    return rpc._rref_context_get_debug_info()


def make_rrefs(values: list[Any]) -> list[Any]:
    return [rpc.RRef(value) for value in values]


def gather(obj: Any, names: list[str]) -> Any:
    return rpc._all_gather(obj, set(names))


def objects() -> int:
    """Return how many objects Python's collector tracks in this process."""
    gc.collect()
    return len(gc.get_objects())


def say(text: str) -> None:
    print(text)
    print(text + "-err", file=sys.stderr)


class Adder:
    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.lock = threading.Lock()

    def add(self, x: int) -> int:
        return self.base + x

    def raise_base(self, by: int) -> int:
        with self.lock:
            self.base += by
            return self.base

    @staticmethod
    def static(x: int) -> int:
        return x * 2

    @classmethod
    def named(cls, x: int) -> tuple[str, int]:
        return cls.__name__, x

    @rpc.functions.async_execution
    def add_at(self, to: str, x: int) -> Any:
        return rpc.rpc_async(to, add, args=(x, self.base))

    def wait_for(self, name: str) -> None:
        while name not in shared:
            time.sleep(0.01)

    def slow(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.base

    def hang(self) -> None:
        hang()


class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    def moved(self, by: int) -> "Point":
        return Point(self.x + by)


@torch.jit.script
def scripted_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def obey() -> None:
    """Run the code on stdin, a JSON string a line; print the value or error of each."""
    import torch.distributed.rpc as torch_rpc

    names = {"rpc": torch_rpc, "torch": torch, "targets": sys.modules[__name__], "os": os}
    for line in sys.stdin:
        code = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            exec(f"value = {code}" if "\n" not in code else code, names)
            answer["value"] = names.pop("value", None)
        except BaseException as exc:
            answer["error"] = f"{type(exc).__name__}: {exc}"
        print(OBEYED + json.dumps(answer, default=repr), flush=True)


OBEYED = "obeyed "


def step(x, w):
    """Part of a model, for tests of gradients."""
    return torch.tanh(x @ w)


def count_owned():
    """Return how many RRefs this worker owns."""
    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])


# -- streams ------------------------------------------------------------------------------------

#: what happened to the generators that ran here
log: list[Any] = []


@contextlib.contextmanager
def end_noted() -> Iterator[None]:
    """Note in ``log`` how a generator ends."""
    try:
        yield
    except BaseException as error:
        log.append(type(error).__name__)
        raise
    finally:
        log.append("closed")


def up_to(number: int, seconds: float = 0.0) -> Iterator[int]:
    """Yield numbers; note in ``log`` how many were made, and how it ended."""
    with end_noted():
        for each in range(number):
            time.sleep(seconds)
            log.append(each)
            yield each


async def up_to_async(number: int, seconds: float = 0.0) -> AsyncIterator[int]:
    """Yield numbers, as ``up_to`` does."""
    with end_noted():
        for each in range(number):
            await asyncio.sleep(seconds)
            log.append(each)
            yield each


def take_log() -> list[Any]:
    """Return the log, and clear it of that; other threads may add to it meanwhile."""
    taken = [*log]
    del log[: len(taken)]
    return taken


def same_tensor(number: int, floats: int) -> Iterator[torch.Tensor]:
    """Yield one tensor again and again, each time with other values."""
    tensor = torch.empty(floats)
    for each in range(number):
        yield tensor.fill_(each)
        tensor.fill_(-1)


def fail_after(number: int) -> Iterator[int]:
    yield from range(number)
    raise LookupError("no more")


def die_after(number: int) -> Iterator[int]:
    yield from range(number)
    time.sleep(0.5)  # what was yielded has arrived
    kill_me()


def forward(to: str, number: int) -> Iterator[int]:
    """Yield what another worker yields."""
    yield from rpc.stream(to, up_to, args=(number,))


def scaled(weight: torch.Tensor, number: int) -> Iterator[torch.Tensor]:
    for each in range(number):
        yield weight * each


def rrefs_to(number: int) -> Iterator[Any]:
    for each in range(number):
        yield rpc.RRef(each)


def whoever(number: int) -> Iterator[str]:
    for _ in range(number):
        yield rpc.get_worker_info().name


# -- cancellation -------------------------------------------------------------------------------


def spin() -> None:
    """Run until interrupted; note it in ``log``."""
    log.append("begun")
    try:
        while True:
            time.sleep(0.001)
    except BaseException as error:
        log.append(type(error).__name__)
        raise
    finally:
        log.append("ended")


async def await_spin(to: str) -> Any:
    future: Any = rpc.rpc_async(to, spin)
    try:
        return await future
    except asyncio.CancelledError as error:
        log.append(type(error).__name__)
        raise


async def nap_async(seconds: float, result: Any = None) -> Any:
    await asyncio.sleep(seconds)
    return result


def total(to: str, number: int) -> int:
    """Add up what a stream yields."""
    return sum(rpc.stream(to, up_to, args=(number,)))


def served() -> int:
    """Return how many calls this worker serves."""
    active: int = rpc._get_current_rpc_agent().callee.active
    return active


def chatter(to: str, number: int) -> int:
    """Call another worker again and again, in several ways."""
    for each in range(number):
        assert rpc.rpc_sync(to, add, args=(each,)) == each + 1
        tensor = torch.full((2,), float(each))
        assert rpc.rpc_async(to, identity, args=(tensor,)).wait()[0] == each
        assert rpc.remote(to, add, args=(each,)).to_here() == each + 1
    return number
