"""Hooks of calls: when each step comes, in which order hooks take it, and what they may change."""

import contextlib
import threading

import pytest
import torch
from conftest import eventually
from memory_workers import WAIT, memory_group
from torch.futures import Future

from rayrpc._protocol.ids import WorkerInfo
from rayrpc._protocol.messages import EMPTY, Payload
from rayrpc._runtime.hooks import Hook, IncomingCall, OutgoingCall, all_of, meta_of
from rayrpc._runtime.invocation import Invocation
from rayrpc.errors import WorkerDiedError


def add(x, y):
    return x + y


def fail():
    raise KeyError("as expected")


def make_lock():
    return threading.Lock()


async def add_slowly(x, y):
    woken = torch.futures.Future()
    threading.Timer(0.0, lambda: woken.set_result(x + y)).start()
    return await Woken(woken)


class Woken:
    """An awaitable that asks the loop for one step more."""

    def __init__(self, future):
        self.future = future

    def __await__(self):
        yield
        return self.future.wait()


class NoUnpickling:
    """Fails where it arrives."""

    def __reduce__(self):
        return fail, ()


@contextlib.contextmanager
def failing(*_):
    """Fail when it is entered."""
    fail()
    yield


log: list[str] = []


class Steps(Hook):
    """Log each step, with the hook's name and the call's mode."""

    def __init__(self, name):
        self.name = name

    def _note(self, step):
        log.append(f"{self.name}: {step}")

    @contextlib.contextmanager
    def _within(self, step):
        self._note(step)
        try:
            yield
        finally:
            self._note(f"end of {step}")

    def on_peer_lost(self, worker, error):
        self._note(f"lost {worker}")

    def close(self):
        self._note("close")

    def before_send(self, call):
        call.meta[self.name] = call.mode
        return self._within("before_send")

    def after_encode(self, call):
        self._note("after_encode")

    def make_future(self, call):
        self._note("make_future")

    def before_run(self, call):
        return self._within("before_run")

    def on_undecodable(self, src, meta):
        self._note(f"on_undecodable {src} {meta}")

    def before_resume(self, call):
        return self._within("before_resume")

    def before_reply(self, call):
        return self._within("before_reply")

    def after_encode_reply(self, call):
        self._note("after_encode_reply")
        call.reply_meta[self.name] = "value"

    def after_kept(self, call):
        self._note("after_kept")
        call.reply_meta[self.name] = "kept"

    def on_result(self, call, value, meta):
        self._note(f"on_result {meta}")
        return value


@pytest.fixture
def start():
    log.clear()
    with memory_group() as start:
        yield start


@pytest.fixture
def pair(start):
    """Two workers, each with the hooks x and y."""
    return start("a", hooks=[Steps("x"), Steps("y")]), start("b", hooks=[Steps("x"), Steps("y")])


def spans(step, inside=()):
    return [f"x: {step}", f"y: {step}", *inside, f"y: end of {step}", f"x: end of {step}"]


def both(step):
    return [f"x: {step}", f"y: {step}"]


class TestOrder:
    def test_a_call_and_its_reply_take_each_step_hook_by_hook(self, pair):
        a, b = pair
        assert a.sync(b, add, 1, 2) == 3
        assert log == [
            *spans("before_send", both("after_encode")),
            *spans("before_run"),
            *spans("before_reply"),
            *both("after_encode_reply"),
            *both("on_result value"),
        ]

    def test_a_future_is_made_before_the_call_is_sent(self, pair):
        a, b = pair
        assert a.future(b, add, 1, 2).wait() == 3
        sent = log.index("y: make_future")
        assert log.index("y: after_encode") < sent < log.index("x: before_run")
        assert "x: end of before_send" in log and log.count("x: make_future") == 1

    def test_a_function_that_fails_has_no_step_of_a_reply(self, pair):
        a, b = pair
        with pytest.raises(KeyError, match="as expected"):
            a.sync(b, fail)
        assert log == [*spans("before_send", both("after_encode")), *spans("before_run")]

    def test_a_result_that_cannot_be_sent_ends_the_context_of_its_reply(self, pair):
        a, b = pair
        with pytest.raises(RuntimeError, match="cannot be sent"):
            a.sync(b, make_lock)
        assert log[-4:] == spans("before_reply")

    def test_a_call_that_cannot_be_decoded_is_reported_in_place_of_run(self, pair):
        a, b = pair
        with pytest.raises(KeyError, match="as expected"):
            a.sync(b, add, 1, NoUnpickling())
        assert log == [
            *spans("before_send", both("after_encode")),
            *both(f"on_undecodable {a.member.id} sync"),
        ]

    def test_a_call_that_cannot_be_encoded_ends_the_context_and_is_not_sent(self, pair):
        a, b = pair
        with pytest.raises(RuntimeError, match="cannot be sent"):
            a.sync(b, add, 1, threading.Lock())
        assert log == spans("before_send") and a.agent.caller.active == 0

    def test_the_steps_of_a_coroutine_run_in_contexts_of_their_own(self, pair):
        a, b = pair
        assert a.sync(b, add_slowly, 1, 2) == 3
        steps = [each for each in log if "before_resume" in each]
        assert len(steps) >= 8 and steps == spans("before_resume") * (len(steps) // 4)
        assert log.index("x: end of before_run") < log.index("x: before_resume")
        assert log[-8:] == [
            *spans("before_reply"),
            *both("after_encode_reply"),
            *both("on_result value"),
        ]

    def test_a_remote_call_is_kept_and_a_fetch_runs_nothing(self, pair):
        a, b = pair
        rref = a.remote(b, add, 1, 2)
        rref._get_future().wait()
        assert log[-4:] == [*both("after_kept"), *both("on_result kept")]
        assert not [each for each in log if "reply" in each]
        log.clear()
        assert rref.to_here() == 3
        assert log == [
            *spans("before_send", both("after_encode")),
            *spans("before_run"),
            *spans("before_reply"),
            *both("after_encode_reply"),
            *both("on_result value"),
        ]


class TestWhoTakesPart:
    def test_only_hooks_whose_entry_came_along_are_asked_at_the_callee(self, start):
        class Silent(Steps):
            def before_send(self, call):
                return contextlib.nullcontext()

        a = start("a", hooks=[Steps("x"), Silent("y")])
        b = start("b", hooks=[Steps("y"), Steps("z")])
        assert a.sync(b, add, 1, 2) == 3
        assert not [each for each in log if "run" in each or "reply" in each or "result" in each]

    def test_a_worker_may_lack_the_hook_of_its_caller(self, start):
        a, b = start("a", hooks=[Steps("x")]), start("b")
        assert a.sync(b, add, 1, 2) == a.future(b, add, 1, 2).wait() == 3
        assert b.sync(a, add, 1, 2) == 3
        assert "x: before_run" not in log

    @pytest.mark.parametrize("mode", ["sync", "async", "remote", "fetch"])
    def test_a_hook_takes_part_in_calls_of_its_modes_alone(self, start, mode):
        hook = Steps("x")
        hook.modes = frozenset({mode})
        a, b = start("a", hooks=[hook]), start("b", hooks=[Steps("x")])
        a.sync(b, add, 1, 2)
        a.future(b, add, 1, 2).wait()
        a.remote(b, add, 1, 2).to_here()
        assert log.count("x: before_send") == log.count("x: before_run") == 1
        assert [each for each in log if "result" in each] == [
            "x: on_result kept" if mode == "remote" else "x: on_result value"
        ]

    def test_what_a_hook_wants_is_asked_for_each_call(self, start):
        answers = iter([True, False, True])

        class Choosing(Steps):
            def wants(self):
                return next(answers)

        a, b = start("a", hooks=[Choosing("x")]), start("b")
        for _ in range(3):
            a.sync(b, add, 1, 2)
        assert log.count("x: before_send") == 2

    def test_a_hook_that_overrides_nothing_changes_nothing(self, start):
        class Present(Hook):
            name = "present"

            def before_send(self, call):
                call.meta[self.name] = None
                return super().before_send(call)

            def after_encode_reply(self, call):
                call.reply_meta[self.name] = None

        a, b = start("a", hooks=[Present()]), start("b", hooks=[Present()])
        assert a.sync(b, add, 1, 2) == a.future(b, add, 1, 2).wait() == 3
        assert a.remote(b, add, 1, 2).to_here() == a.sync(b, add_slowly, 1, 2) == 3
        with pytest.raises(KeyError):
            a.sync(b, add, 1, NoUnpickling())
        assert Hook().debug_info() == {} and Hook().wants() and not Hook().needs_future


class TestChanges:
    def test_a_hook_may_change_the_value_and_the_next_one_gets_that(self, start):
        class Times(Steps):
            def __init__(self, name, factor):
                super().__init__(name)
                self.factor = factor

            def on_result(self, call, value, meta):
                assert call.mode == "sync" and meta == "value"
                return self.factor(value)

        hooks = [Times("x", lambda value: value * 10), Times("y", lambda value: value + 1)]
        a, b = start("a", hooks=hooks), start("b", hooks=[Steps("x"), Steps("y")])
        assert a.sync(b, add, 1, 2) == 31

    def test_an_error_of_on_result_is_that_of_the_call(self, start):
        class Failing(Steps):
            def on_result(self, call, value, meta):
                fail()

        a, b = start("a", hooks=[Failing("x")]), start("b", hooks=[Steps("x")])
        for call in (lambda: a.sync(b, add, 1, 2), lambda: a.future(b, add, 1, 2).wait()):
            with pytest.raises(KeyError, match="as expected"):
                call()
        assert a.agent.caller.active == 0

    @pytest.mark.parametrize("step", ["before_send", "after_encode"])
    @pytest.mark.parametrize("way", ["sync", "future", "remote"])
    def test_an_error_before_a_call_is_sent_leaves_nothing_of_it(self, start, step, way):
        class Failing(Steps):
            pass

        setattr(Failing, step, failing if step == "before_send" else lambda self, call: fail())
        a, b = start("a", hooks=[Steps("w"), Failing("x")]), start("b", hooks=[Steps("w")])
        with pytest.raises(KeyError, match="as expected"):
            getattr(a, way)(b, add, 1, 2)
        assert a.agent.caller.active == 0 and eventually(a.is_empty)
        assert "w: end of before_send" in log and "w: before_run" not in log

    @pytest.mark.parametrize("step", ["before_run", "before_reply", "after_encode_reply"])
    def test_an_error_at_the_callee_is_that_of_the_call(self, start, step):
        class Failing(Steps):
            pass

        setattr(Failing, step, lambda self, call: fail())
        a, b = start("a", hooks=[Steps("x")]), start("b", hooks=[Failing("x")])
        with pytest.raises(KeyError, match="as expected"):
            a.sync(b, add, 1, 2)
        assert b.agent.callee.active == 0

    def test_the_first_hook_that_makes_a_future_decides(self, start):
        class Making(Steps):
            def __init__(self, name, future):
                super().__init__(name)
                self.future = future

            def make_future(self, call):
                return self.future

        mine, other = Future(), Future()
        a = start("a", hooks=[Making("x", None), Making("y", mine), Making("z", other)])
        future = a.future(start("b"), add, 1, 2)
        assert future is mine and future.wait() == 3 and not other.done()

    def test_hooks_replace_the_future_of_the_user_one_after_the_other(self, start):
        class Then(Steps):
            def after_send(self, call, future):
                return future.then(lambda done: [*done.value(), self.name])

        a = start("a", hooks=[Then("x"), Then("y")])
        b = start("b")
        assert a.future(b, add, [1], [2]).wait() == [1, 2, "x", "y"]
        rref = a.remote(b, add, [1], [2])
        assert rref.to_here() == [1, 2]

    def test_a_blocking_call_waits_for_the_future_of_a_hook_that_needs_one(self, start):
        class Needing(Steps):
            needs_future = True

            def after_send(self, call, future):
                assert call.mode == "sync"
                return future.then(lambda done: done.value() * 2)

        a, b = start("a", hooks=[Needing("x")]), start("b")
        assert a.sync(b, add, 1, 2) == 6

    def test_a_hook_may_change_what_runs(self, start):
        class Swapping(Steps):
            def before_send(self, call):
                call.invocation = Invocation(add, (*call.invocation.args, call.src.name))
                return super().before_send(call)

        a, b = start("a", hooks=[Swapping("x")]), start("b")
        assert a.sync(b, fail, "by ") == a.future(b, fail, "by ").wait() == "by a"
        assert a.remote(b, fail, "by ").to_here() == "by a"


class TestLife:
    def test_a_loss_and_the_shutdown_are_told_to_all(self, start):
        a = start("a", hooks=[Steps("x"), Steps("y")])
        b = start("b")
        b.die()
        assert eventually(lambda: log == both(f"lost {b.member.id}"))
        a.agent.shutdown()
        a.agent.shutdown()
        assert log[2:] == both("close")

    def test_the_error_of_a_loss_names_the_worker(self, start):
        errors = []

        class Losing(Hook):
            def on_peer_lost(self, worker, error):
                errors.append(error)

        start("a", hooks=[Losing()])
        start("b").die()
        assert eventually(lambda: errors)
        assert isinstance(errors[0], WorkerDiedError) and "'b'" in str(errors[0])

    def test_calls_of_several_threads_have_records_of_their_own(self, start, quick_switches):
        class Numbering(Hook):
            name = "numbering"

            def before_send(self, call):
                call.meta[self.name] = call.notes[self.name] = call.invocation.args[0]
                return super().before_send(call)

            def before_run(self, call):
                call.notes[self.name] = call.meta[self.name]
                return super().before_run(call)

            def after_encode_reply(self, call):
                call.reply_meta[self.name] = call.notes[self.name]

            def on_result(self, call, value, meta):
                return value, meta, call.notes[self.name]

        a, b = start("a", hooks=[Numbering()]), start("b", hooks=[Numbering()])
        ends = []

        def run(first):
            futures = {n: a.future(b, add, n, 0) for n in range(first, first + 20)}
            ends.extend(future.wait() == (n, n, n) for n, future in futures.items())

        threads = [threading.Thread(target=run, args=(n * 100,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert ends == [True] * 80


# -- the functions of the module ------------------------------------------------------------------


@pytest.fixture
def call():
    return OutgoingCall("sync", WorkerInfo("b", 1), WorkerInfo("a", 0), Invocation(add, (1, 2)))


class TestAllOf:
    def test_contexts_end_in_reverse(self):
        log.clear()
        with all_of([Steps(name).before_run(None) for name in "xyz"]):
            log.append("inside")
        ends = ["z: end of before_run", "y: end of before_run", "x: end of before_run"]
        assert log[3:] == ["inside", *ends]

    def test_one_alone_is_the_context_itself_and_none_is_one_that_does_nothing(self):
        one = contextlib.nullcontext()
        assert all_of([one]) is one
        with all_of([]):
            pass

    def test_those_that_were_entered_end_when_another_one_fails(self):
        log.clear()
        steps = [Steps("x").before_run(None), failing(), Steps("z").before_run(None)]
        with pytest.raises(KeyError):
            with all_of(steps):
                log.append("inside")
        assert log == ["x: before_run", "x: end of before_run"]

    def test_an_error_inside_passes_all_of_them(self):
        seen = []

        @contextlib.contextmanager
        def noting():
            try:
                yield
            except KeyError as exc:
                seen.append(exc)
                raise

        with pytest.raises(KeyError):
            with all_of([noting(), noting()]):
                fail()
        assert len(seen) == 2 and seen[0] is seen[1]


class TestMetaOf:
    def test_no_entry_is_no_meta(self, call):
        assert meta_of(call, []) is None and meta_of(call, [Hook()]) is None

    def test_entries_may_come_with_the_encoded_call(self, call):
        class Sizing(Hook):
            def after_encode(self, call):
                call.meta["size"] = call.size

        payload = Payload(b"123", [b"45", memoryview(b"6789")])
        assert meta_of(call, [Sizing()], payload) == {"size": 9}

    def test_the_payload_is_held_only_meanwhile(self, call):
        meta_of(call, [], Payload(b"123", []))
        assert call.payload is None and call.size == 0

    def test_an_empty_payload_has_no_size(self, call):
        call.payload = EMPTY
        assert call.size == 0


def test_records_do_not_share_their_entries(call):
    other = OutgoingCall("sync", call.to, call.src, call.invocation)
    call.meta["x"] = call.notes["x"] = 1
    assert other.meta == other.notes == {}
    first, second = IncomingCall(0, None, {}), IncomingCall(0, None, {})
    first.reply_meta["x"] = first.notes["x"] = 1
    assert second.reply_meta == second.notes == {}
