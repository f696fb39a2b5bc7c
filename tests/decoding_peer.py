"""A process that decodes what a codec has encoded, runs it, and encodes it again.

Requests are read from stdin, answers written to stdout, each with its length before it.
"""

import pickle
import struct
import subprocess
import sys
from typing import Any

_LENGTH = struct.Struct("<Q")


class Peer:
    """The process, for one that encodes.

    Args:
        codec: encodes for it.
    """

    def __init__(self, codec):
        self._codec = codec
        self._process: Any = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

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
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def _ask(self, *request):
        write(self._process.stdin, request)
        is_error, answer = read(self._process.stdout)
        if is_error:
            raise RuntimeError(answer)
        return answer


def write(file, obj):
    """Write an object."""
    data = pickle.dumps(obj)
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def read(file):
    """Return the next object; raises EOFError at the end."""
    header = file.read(_LENGTH.size)
    if not header:
        raise EOFError
    return pickle.loads(file.read(*_LENGTH.unpack(header)))


def main():
    """Answer requests until there are no more."""
    from rayrpc._runtime.serialization.codec import Codec
    from rayrpc._runtime.serialization.sessions import NoRRefs

    codec = Codec(NoRRefs("no RRefs here"))
    kept = []

    def answer(what, given):
        if what == "keep":
            kept.append(codec.decode(given, (), ()))
            return len(kept) - 1
        func, args = kept[given]
        return func(*args) if what == "run" else codec.encode((func, args), 1, False).data

    while True:
        try:
            request = read(sys.stdin.buffer)
        except EOFError:
            return
        try:
            write(sys.stdout.buffer, (False, answer(*request)))
        except Exception as exc:
            write(sys.stdout.buffer, (True, f"{type(exc).__name__}: {exc}"))


if __name__ == "__main__":
    main()
