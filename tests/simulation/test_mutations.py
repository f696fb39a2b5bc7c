"""Small faults that are put into the code one by one: the simulation finds each of them."""

import pytest
from simulation.mutation import Mutation, mutated
from simulation.separately import first_failure

pytestmark = pytest.mark.process

MOST_SEEDS = 10_000

CONNECTION = "_transports.direct.connection"
REPLY_READER = "_transports.direct.reply_reader"
CALL = "_transports.direct.connection_call"
SCHEDULE = "_transports.direct.reader_schedule"
SEND_QUEUE = "_transports.direct.send_queue"
READER = "_concurrency.reader"
THREADS = "_concurrency.threads"
PROMISE = "_concurrency.promise"
STREAM = "_transports.direct.stream"
IDLE_CONNECTIONS = "_transports.direct.idle_connections"
BULK_REPLIES = "_transports.direct.bulk_replies"

MUTATIONS = [
    Mutation(
        "an error of a callback goes through the reader",
        CALL,
        "        except Exception:",
        "        except ValueError:",
    ),
    Mutation(
        "a caller that has its reply keeps the role of the reader",
        REPLY_READER,
        """\
                    self._release_reader(call.waiter or call)
                    if is_done:
""",
        """\
                    if is_done:

""",
    ),
    Mutation(
        "a caller that gives up, and was to be the reader, releases no reader",
        REPLY_READER,
        "        if reads:\n            self._on_read_error",
        "        if reads and type(error) is not TimeoutError:\n            self._on_read_error",
    ),
    Mutation(
        "whether a call is pending is checked outside of the lock",
        CALL,
        """\
            with self._lock:
                is_pending = self._value is PENDING
""",
        """\
            is_pending = self._value is PENDING
            with self._lock:
""",
    ),
    Mutation(
        "the next caller stays among those that wait",
        SCHEDULE,
        "            del self._waiting[caller]\n",
        "\n",
    ),
    Mutation(
        "a delayed start is forgotten",
        SCHEDULE,
        "        return self.callbacks > 0 and self.claim(THREAD_READS)",
        "        return self.callbacks > 1 and self.claim(THREAD_READS)",
    ),
    Mutation(
        "two threads write at once",
        SEND_QUEUE,
        "if self._writer or (more and len(self._queue) < MAX_HELD_BACK):",
        "if more and len(self._queue) < MAX_HELD_BACK:",
    ),
    Mutation(
        "a role is released outside of its lock",
        READER,
        """\
        with self._lock:
            if self.state != HANDLING or serial not in (None, self.serial):
                return
            self.state = RELEASED
""",
        """\
        with self._lock:
            if self.state != HANDLING or serial not in (None, self.serial):
                return
        self.state = RELEASED
""",
    ),
    Mutation(
        "a thread that was idle for long leaves without a look at the tasks",
        THREADS,
        "if self._tasks:\n                    self._taken += 1",
        "if self._tasks and not has_timed_out:\n                    self._taken += 1",
    ),
    Mutation(
        "a connection that is cut is not broken off",
        REPLY_READER,
        """            self._break_off(f"its connection was cut ({exc})")\n""",
        "            pass\n",
    ),
    Mutation(
        "a value is set twice",
        PROMISE,
        """\
        with self._lock:
            if self._value is not PENDING:
                return False
            self._value = value
        if self._callbacks is not None:
""",
        """\
        if self._value is not PENDING:
            return False
        with self._lock:
            self._value = value
        if self._callbacks is not None:
""",
    ),
    Mutation(
        "a relieved thread reads on",
        READER,
        """\
        with self._lock:
            if self.state == RELEASED:
                return False
            self.state = READING
            return True
""",
        """\
        if self.state == RELEASED:
            return False
        with self._lock:
            self.state = READING
            return True
""",
    ),
    Mutation(
        "the last thread that wrote seems to write still",
        SEND_QUEUE,
        """\
                        self._writing = []
                        self._writer = 0
                        return True
""",
        """\
                        self._writing = []
                        return True

""",
    ),
    Mutation(
        "a call that is made while the connection opens is not sent",
        CONNECTION,
        """\
        with self._lock:
            self._stream = stream
            calls = list(self._calls.values())
            is_broken = self.schedule.state == BROKEN
""",
        """\
        with self._lock:
            calls = list(self._calls.values())
            is_broken = self.schedule.state == BROKEN
        self._stream = stream
""",
    ),
    Mutation(
        "a writer that is interrupted hands over to no thread",
        SEND_QUEUE,
        "            self._writer = HANDED_OVER\n        self._threads.submit(self._resume)",
        "            self._writer = HANDED_OVER",
    ),
    Mutation(
        "a reply whose reader is interrupted is set for nobody",
        CONNECTION,
        "            self._threads.submit(functools.partial(call.set_again, reply))",
        "            pass",
    ),
    Mutation(
        "a task that no thread takes is forgotten",
        THREADS,
        "            elif stalled or self._count < self._soft_limit:",
        "            elif False:",
    ),
]


# ... and those that the scenarios of whole workers find.
MUTATIONS_OF_GROUPS = [
    (
        "agents",
        Mutation(
            "a finalizer calls where its thread is interrupted",
            "_runtime.interrupting_calls",
            "    frame: FrameType | None = sys._getframe(1)",
            "    return False",
        ),
    ),
    (
        "rrefs",
        Mutation(
            "a remote call that arrives after its deletion is counted",
            "_protocol.rref_table",
            "        if fork_id in self._cancelled:",
            "        if False and fork_id in self._cancelled:",
        ),
    ),
    (
        "rrefs",
        Mutation(
            "the forks of a request that is not sent are counted",
            "_runtime.serialization.codec",
            "            if forks and lends:  # a request",
            "            if False and lends:  # a request",
        ),
    ),
    (
        "transport",
        Mutation(
            "a message that waits has the bytes that the program has written since",
            SEND_QUEUE,
            "                    message = message.kept()",
            "                    message = message._replace(is_pending=True)",
        ),
    ),
    (
        "transport",
        Mutation(
            "a segment is used again while its buffers are read",
            "_transports.direct.shared_memory",
            "                del free[-1]\n",
            "\n",
        ),
    ),
    (
        "transport",
        Mutation(
            "received memory is used again while it is read",
            "_transports.direct.received_memory",
            "        self._used[id(used)] = used\n",
            "        self._free[capacity].append((time.monotonic(), memory))\n",
        ),
    ),
    (
        "transport",
        Mutation(
            "tasks that wait until the peer has read do not run",
            STREAM,
            "            is_first = len(self._held) == 1",
            "            is_first = len(self._held) == 2",
        ),
    ),
    (
        "transport",
        Mutation(
            "a reply waits for a connection that has just been opened",
            BULK_REPLIES,
            """\
                connection = self._connections.get(pair)
                if connection is None or connection.is_closed:
                    if source.is_closed:
""",
            """\

                if connection is None or connection.is_closed:
                    if source.is_closed:
""",
        ),
    ),
    (
        "transport",
        Mutation(
            "replies that wait are kept when their peer is lost",
            BULK_REPLIES,
            "            self._waiting.pop(pair, None)\n",
            "\n",
        ),
    ),
    (
        "transport",
        Mutation(
            "the thread that waits for idle connections does not learn of another one",
            IDLE_CONNECTIONS,
            "        self._wake()\n        return True\n",
            "        return True\n\n",
        ),
    ),
    (
        "connection",
        Mutation(
            "an idle connection is kept after the end of the thread that waits",
            IDLE_CONNECTIONS,
            "if self._closed or not self._thread.is_running:",
            "if not self._thread.is_running:",
        ),
    ),
]


def test_every_fault_is_one_of_the_code_as_it_is():
    for mutation in (*MUTATIONS, *(mutation for _, mutation in MUTATIONS_OF_GROUPS)):
        with mutated(mutation):
            pass


@pytest.mark.parametrize(
    ("scenario", "mutation"),
    [*(("connection", mutation) for mutation in MUTATIONS), *MUTATIONS_OF_GROUPS],
    ids=lambda each: each.name if isinstance(each, Mutation) else each,
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_simulation_finds_a_fault(scenario, mutation):
    assert first_failure(scenario, range(MOST_SEEDS), mutation), "no seed finds it"
