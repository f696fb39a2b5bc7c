"""The scheduler: the same run by the same seed, and every way in which a program can fail."""

import contextlib
import random
import socket
import time
import traceback

import pytest
from simulation import network, primitives
from simulation.scenario import run, shrink
from simulation.scheduler import SIMULATED_FILES, ExpectedError, Scheduler, current
from simulation.strategies import Freezing, Priorities, RandomWalk, strategy_for

SEEDS = range(300)


def simulate(main, seed=0, **options):
    scheduler = Scheduler(strategy_for(seed), seed, **options)
    failures = scheduler.run(main)
    return scheduler, (failures[0] if failures else None)


def start(*functions):
    threads = [
        primitives.Thread(target=each, name=f"thread {n}") for n, each in enumerate(functions)
    ]
    for each in threads:
        each.start()
    return threads


def finish(*functions):
    for each in start(*functions):
        each.join()


def failures_of(main, seeds=SEEDS, **options):
    found = [simulate(main, seed, **options)[1] for seed in seeds]
    return [each.summary for each in found if each is not None]


@pytest.fixture
def this_code_is_simulated():
    SIMULATED_FILES.add(__file__)
    yield
    SIMULATED_FILES.clear()


class TestRuns:
    def test_the_same_seed_gives_the_same_run(self):
        def main():
            lock = primitives.Lock()

            def work():
                for _ in range(20):
                    with lock:
                        primitives.sleep(current().current.random.random())

            finish(work, work, work)

        digests = [simulate(main, seed)[0].digest for seed in range(9)]
        assert digests == [simulate(main, seed)[0].digest for seed in range(9)]
        assert len(set(digests)) > 5

    def test_waiting_takes_no_time(self):
        began = time.monotonic()
        scheduler, failure = simulate(lambda: primitives.sleep(1e6))
        assert failure is None and scheduler.now >= 1e6
        assert time.monotonic() - began < 60

    def test_threads_that_are_left_end_with_the_run(self):
        ended = []

        def waits():
            try:
                primitives.Event().wait()
            finally:
                ended.append(True)

        scheduler, failure = simulate(lambda: start(waits, waits) and primitives.sleep(1))
        assert failure is None and ended == [True, True]
        assert all(thread.is_done for thread in scheduler.threads)

    @pytest.mark.parametrize("strategy", [RandomWalk, Freezing, Priorities])
    def test_each_strategy_finds_a_lost_update(self, strategy):
        def main():
            lock, value = primitives.Lock(), [0]

            def add():
                with lock:
                    seen = value[0]
                with lock:
                    value[0] = seen + 1

            finish(add, add)
            assert value[0] == 2, "an update was lost"

        found = 0
        for seed in SEEDS:
            scheduler = Scheduler(strategy(random.Random(seed)), seed)
            found += bool(scheduler.run(main))
        assert 0 < found < len(SEEDS)

    def test_lines_are_steps_where_that_is_chosen(self, this_code_is_simulated):
        value = [0]

        def add():
            seen = value[0]
            value[0] = seen + 1

        def main():
            value[0] = 0
            finish(add, add)
            assert value[0] == 2, "an update was lost"

        assert not failures_of(main)
        assert failures_of(main, lines=True, line_chance=0.3)


class TestFailures:
    def test_a_deadlock_is_one_with_the_stacks_of_all_threads(self):
        def main():
            first, second = primitives.Lock(), primitives.Lock()

            def take_both(one, other):
                with one, other:
                    pass

            finish(lambda: take_both(first, second), lambda: take_both(second, first))

        found = [failure for seed in SEEDS if (failure := simulate(main, seed)[1])]
        assert found and len(found) < len(SEEDS)
        assert found[0].summary.startswith("deadlock")
        assert found[0].details.count(", in take_both") == 2
        assert "The last steps" in found[0].details

    def test_a_lost_wake_up_is_one(self):
        def main():
            event, waits = primitives.Event(), [False]

            def wait():
                waits[0] = True
                event.wait()

            def wake():
                primitives.sleep(0)
                if waits[0]:
                    event.set()

            finish(wait, wake)

        assert any("deadlock" in each for each in failures_of(main))

    def test_a_livelock_is_one(self):
        def main():
            while True:
                primitives.sleep(0.001)

        assert simulate(main, max_steps=500)[1].summary == "no end after 500 steps"

    def test_an_exception_is_one_in_any_thread_and_in_the_log(self, caplog):
        import logging

        def raises():
            raise ValueError("of a thread")

        def logs():
            try:
                raise ValueError("that is logged")
            except ValueError:
                logging.getLogger("rayrpc.x").exception("an error")

        def expected():
            try:
                raise ExpectedError
            except ExpectedError:
                logging.getLogger("rayrpc.x").exception("an error")

        assert simulate(lambda: finish(raises))[1].summary.startswith("ValueError: of a thread")
        assert simulate(lambda: finish(logs))[1].summary.startswith("ValueError: that is logged")
        assert simulate(lambda: finish(expected))[1] is None

    def test_a_broken_invariant_is_one(self):
        def main():
            value = [0]
            current().invariants.append(lambda: "it is 2" if value[0] == 2 else None)
            for value[0] in range(3):
                primitives.sleep(0.1)

        assert simulate(main)[1].summary == "it is 2"

    def test_an_injected_error_strikes_waits_and_starts(self):
        def main():
            current().chance_of_interrupts = current().chance_of_failed_starts = 0.5
            current().current.may_be_interrupted = True
            try:
                finish(lambda: None)
                primitives.sleep(1)
            except (KeyboardInterrupt, RuntimeError, MemoryError) as exc:
                raise AssertionError(type(exc).__name__) from None

        assert {each.split()[1] for each in failures_of(main)} >= {
            "KeyboardInterrupt",
            "RuntimeError",
            "MemoryError",
        }

    def test_an_interrupt_strikes_between_any_call_and_what_follows(self, this_code_is_simulated):
        def nothing():
            pass

        def work():
            done = [0]
            nothing()
            done.append(1)
            for _ in range(2):
                done.append(2)

        def interrupted_after(points):
            where = []

            def main():
                current().interrupt_after(points)
                try:
                    work()
                except KeyboardInterrupt as exc:
                    frame = traceback.TracebackException.from_exception(exc, capture_locals=True)
                    where.append((frame.stack[1].locals or {}).get("done"))

            assert simulate(main)[1] is None
            return where

        found = [interrupted_after(points) for points in range(1, 30)]
        assert ["[0, 1]"] in found and ["[0, 1, 2]"] in found and ["[0, 1, 2, 2]"] in found
        assert [] in found, "some are too late"

    @pytest.mark.parametrize("kind", ["Condition", "Event", "Semaphore"])
    def test_an_interrupt_strikes_in_the_python_code_of_threading_too(self, kind):
        """With the lock held, that is: whoever takes it next waits for ever."""

        def main(points):
            held = getattr(primitives, kind)()

            def use():
                if kind == "Condition":
                    with held:
                        held.notify_all()
                elif kind == "Event":
                    held.set()
                else:
                    held.release()

            current().interrupt_after(points)
            with contextlib.suppress(KeyboardInterrupt):
                use()
            current().current.interrupt_after = 0
            finish(use)

        found = [simulate(lambda points=points: main(points))[1] for points in range(1, 30)]
        assert any(each and each.summary.startswith("deadlock") for each in found)

    def test_a_handler_of_signals_runs_at_such_a_point_and_the_thread_goes_on(
        self, this_code_is_simulated
    ):
        def work(done):
            done.append(1)
            done.append(2)

        def handled_after(points):
            done = []

            def main():
                current().interrupt_after(points, lambda: done.append("handler"))
                work(done)

            assert simulate(main)[1] is None
            return done

        found = [handled_after(points) for points in range(1, 10)]
        assert [1, "handler", 2] in found and [1, 2] in found

    def test_the_garbage_collector_runs_finalizers_under_locks_one_at_a_time(self):
        def main():
            lock, others, running = primitives.RLock(), primitives.Lock(), []

            def finalize():
                assert not running
                running.append(1)
                with others:
                    primitives.sleep(0.1)
                running.clear()
                found.add(lock._is_owned())

            current().finalizer, current().chance_of_finalizers = finalize, 0.2

            def work():
                with lock:
                    pass
                primitives.Event().wait(0.1)

            finish(work, work)

        found: set[bool] = set()
        assert failures_of(main) == []
        assert found == {True, False}


class Racing:
    """A scenario with a race between the first thread that is there and any other one."""

    name = "racing"

    def program(self, rng):
        return tuple(rng.randint(1, 5) for _ in range(rng.randint(2, 5)))

    def smaller(self, program):
        for index in range(len(program)):
            yield program[:index] + program[index + 1 :]
            if program[index] > 1:
                yield (*program[:index], program[index] - 1, *program[index + 1 :])

    def run(self, program, scheduler):
        lock, value = primitives.Lock(), [0]

        def add(times):
            for _ in range(times):
                with lock:
                    seen = value[0]
                with lock:
                    value[0] = seen + 1

        finish(*[lambda times=times: add(times) for times in program])
        assert value[0] == sum(program), "an update was lost"


def test_a_failing_run_is_shrunk():
    seed = next(seed for seed in SEEDS if run(Racing(), seed).failure)
    small = shrink(Racing(), seed, run(Racing(), seed))
    assert small.failure is not None and small.failure.summary.startswith("AssertionError")
    assert small.program == (1, 1)
    assert len(small.scheduler.choices) <= 3


class TestConnections:
    def test_bytes_arrive_in_order_whatever_is_sent_and_received_at_a_time(self):
        data = random.Random(1).randbytes(20_000)

        def main():
            near, far = network.connect()
            received = bytearray()

            def receive():
                while part := far.recv(1000):
                    received.extend(part)

            (thread,) = start(receive)
            near.sendall(data)
            near.shutdown(socket.SHUT_WR)
            thread.join()
            assert received == data

        assert not failures_of(main, range(30))

    def test_a_connection_breaks_after_the_bytes_that_it_is_to(self):
        def main():
            near, far = network.connect()
            near.cut_after(5)
            with pytest.raises(BrokenPipeError):
                near.sendall(b"more than that")
            assert far.recv(100, socket.MSG_WAITALL) == b"more " and far.recv(1) == b""

        assert not failures_of(main, range(30))

    def test_a_receive_waits_for_as_long_as_it_may(self):
        def main():
            near, far = network.connect()
            far.settimeout(0.25)
            with pytest.raises(BlockingIOError):
                far.recv(1)
            assert 0.25 <= primitives.monotonic() < 0.26
            near.close()
            assert far.recv(1) == b""
            with pytest.raises(OSError, match="closed"):
                near.recv(1)

        assert not failures_of(main, range(3))

    def test_a_poll_object_is_for_one_thread(self):
        def main():
            _, far = network.connect()
            poll = network.Poll()
            poll.register(far)
            finish(lambda: poll.poll(1), lambda: poll.poll(1))

        assert any("concurrent poll" in each for each in failures_of(main))
