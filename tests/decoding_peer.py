"""A process that decodes the calls that a codec has encoded, runs them, and encodes them again."""

import multiprocessing

from rayrpc._runtime.serialization.codec import Codec
from rayrpc._runtime.serialization.sessions import NoRRefs


def make_codec():
    """Return a codec for objects without RRefs."""
    return Codec(NoRRefs("no RRefs here"))


class Peer:
    """The process, for one that encodes."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._codec = make_codec()
        self._connection, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there,))
        self._process.start()
        there.close()

    def send(self, func, *args):
        """Have the process keep a call; return its number."""
        return self.keep(self._codec.encode((func, args), 1, False).data)

    def keep(self, data):
        """Have the process keep a call that was encoded; return its number."""
        return self._ask("keep", data)

    def run(self, number):
        """Run a kept call; return what it returned."""
        return self._ask("run", number)

    def call(self, func, *args):
        """Keep and run a call."""
        return self.run(self.send(func, *args))

    def encoded(self, number):
        """Return a kept call, as that process encodes it."""
        return self._ask("encode", number)

    def end(self):
        """End the process."""
        self._connection.close()
        self._process.join(10)
        self._process.close()

    def _ask(self, *request):
        self._connection.send(request)
        assert self._connection.poll(60)
        is_error, answer = self._connection.recv()
        if is_error:
            raise RuntimeError(answer)
        return answer


def serve(connection):
    """Answer requests until there are no more."""
    codec = make_codec()
    kept = []

    def answer(what, given):
        if what == "keep":
            kept.append(codec.decode(given, (), ()))
            return len(kept) - 1
        func, args = kept[given]
        return func(*args) if what == "run" else codec.encode((func, args), 1, False).data

    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, answer(*request)))
        except Exception as exc:
            connection.send((True, f"{type(exc).__name__}: {exc}"))
