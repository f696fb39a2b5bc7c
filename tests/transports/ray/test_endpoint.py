"""The endpoint of a hosted worker: who is served when, and how frames travel to it."""

import pickle
import threading

import numpy as np
import pytest
from conftest import eventually, in_thread
from ray.exceptions import RaySystemError

from rayrpc._protocol.messages import Frame, Kind, Objects
from rayrpc._transports.ray import endpoint as endpoint_module
from rayrpc._transports.ray import ray_api
from rayrpc._transports.ray.endpoint import (
    Address,
    HostedEndpoint,
    LivenessWatch,
    from_wire,
    passed_on,
    to_wire,
)
from rayrpc.errors import CallError

WAIT_SECONDS = 60.0


class Server:
    """What the endpoint gives to its worker's transport."""

    def __init__(self, answer=lambda wire, may_block: (wire, may_block)):
        self.answer = answer
        self.replies = []

    def on_reply(self, call_id, wire):
        self.replies.append((call_id, wire))


@pytest.fixture
def endpoint():
    return HostedEndpoint("alice", threads=2)


@pytest.fixture
def impatient(monkeypatch):
    """Calls wait for no worker that does not serve yet."""
    monkeypatch.setattr(endpoint_module, "ATTACH_SECONDS", 0.0)


class TestStates:
    def test_one_transport_at_a_time_has_the_endpoint(self, endpoint):
        assert endpoint.reserve() is endpoint and endpoint.reserve() is None
        endpoint.attach(Server())
        assert endpoint.reserve() is None
        endpoint.detach()
        assert endpoint.reserve() is endpoint

    def test_many_that_reserve_at_once_get_it_once(self, endpoint, quick_switches):
        for _ in range(50):
            barrier = threading.Barrier(4)
            outcomes = [
                in_thread(lambda barrier=barrier: (barrier.wait(WAIT_SECONDS), endpoint.reserve()))
                for _ in range(4)
            ]
            got = [outcome(WAIT_SECONDS)[1] for outcome in outcomes]
            assert got.count(endpoint) == 1 and got.count(None) == 3
            endpoint.detach()

    def test_a_call_waits_for_the_transport_and_is_served_by_it(self, endpoint):
        endpoint.reserve()
        calling = in_thread(lambda: endpoint.call(b"frame"))
        endpoint.attach(Server())
        assert calling(WAIT_SECONDS) == (b"frame", True)

    def test_a_call_that_waits_is_refused_when_the_worker_leaves(self, endpoint, monkeypatch):
        monkeypatch.setattr(endpoint_module, "ATTACH_SECONDS", 1000.0)
        endpoint.reserve()
        calling = in_thread(lambda: endpoint.call(b"frame"))
        endpoint.detach()
        error = calling(WAIT_SECONDS)
        assert isinstance(error, CallError)
        assert "has left its group, or has not joined it yet" in str(error)

    @pytest.mark.parametrize("is_reserved", [True, False])
    def test_a_call_waits_no_longer_than_it_may(self, endpoint, impatient, is_reserved):
        if is_reserved:
            endpoint.reserve()
        with pytest.raises(CallError, match="has not joined it yet"):
            endpoint.call(b"frame")

    def test_calls_are_refused_after_the_group_and_wait_for_the_next_one(self, endpoint):
        endpoint.reserve()
        endpoint.attach(Server())
        endpoint.detach()
        with pytest.raises(CallError, match="has left its group"):
            endpoint.call(b"frame")
        endpoint.reserve()
        calling = in_thread(lambda: endpoint.call(b"frame"))
        endpoint.attach(Server(lambda wire, may_block: b"second group"))
        assert calling(WAIT_SECONDS) == b"second group"

    def test_late_replies_reach_the_transport_that_is_attached(self, endpoint):
        endpoint.deliver(1, b"to nobody")
        endpoint.reserve()
        server = Server()
        endpoint.attach(server)
        endpoint.deliver(2, b"reply")
        endpoint.detach()
        endpoint.deliver(3, b"too late")
        assert server.replies == [(2, b"reply")]


class TestThreads:
    @pytest.fixture
    def release(self):
        release = threading.Event()
        yield release
        release.set()

    @pytest.fixture
    def serving(self, endpoint, release):
        """An endpoint that serves a call, of the two that it can serve at a time."""

        def answer(wire, may_block):
            if wire == b"slow":
                assert release.wait(WAIT_SECONDS)
            return may_block

        endpoint.reserve()
        endpoint.attach(Server(answer))
        slow = in_thread(lambda: endpoint.call(b"slow"))
        assert eventually(lambda: endpoint.call(b"quick") is False)
        yield endpoint
        release.set()
        assert slow(WAIT_SECONDS) is True

    def test_the_last_free_thread_may_not_be_kept(self, serving, release):
        assert serving.call(b"quick") is False
        release.set()
        assert eventually(lambda: serving.call(b"quick") is True)

    def test_a_flush_waits_for_the_calls_that_other_threads_serve(self, serving, release):
        serving.flush_replies(0.0)  # not longer
        flushed = threading.Event()
        flushing = in_thread(lambda: (serving.flush_replies(WAIT_SECONDS), flushed.set()))
        assert not flushed.is_set()
        release.set()
        flushing(WAIT_SECONDS)
        assert flushed.is_set()

    def test_an_error_of_a_call_leaves_its_thread_free(self, endpoint):
        def fail(wire, may_block):
            raise ArithmeticError("unexpected")

        endpoint.reserve()
        endpoint.attach(Server(fail))
        in_thread(lambda: endpoint.call(b"frame"))(WAIT_SECONDS)
        endpoint.attach(Server())
        assert endpoint.call(b"frame") == (b"frame", True)


class TestWatch:
    def test_it_blocks_until_its_own_membership_ends(self):
        watch = LivenessWatch()
        ended = {token: threading.Event() for token in ("first", "second")}
        waits = [
            in_thread(lambda token=token, event=event: (watch.wait(token), event.set()))
            for token, event in ended.items()
        ]
        watch.release("first")
        waits[0](WAIT_SECONDS)
        assert ended["first"].is_set() and not ended["second"].is_set()
        watch.release("second")
        waits[1](WAIT_SECONDS)

    def test_a_membership_that_has_ended_before_is_not_waited_for(self):
        watch = LivenessWatch()
        watch.release("token")
        watch.wait("token")
        watch.wait("token")


BUFFERS = [bytearray(b"abc"), np.arange(6, dtype=np.int32).reshape(2, 3)]


class TestWire:
    def frame(self, buffers=(), objects=None):
        return Frame(Kind.CALL, 7, 3, 9, data=b"payload", buffers=list(buffers), objects=objects)

    def sent(self, wire):
        """Return a wire form as it arrives: buffers have memory of their own."""
        buffers: list = []
        data = pickle.dumps(wire, 5, buffer_callback=buffers.append)
        return pickle.loads(data, buffers=[bytearray(each.raw()) for each in buffers])

    def test_a_frame_without_buffers_is_bytes(self):
        wire = to_wire(self.frame())
        assert type(wire) is bytes and from_wire(self.sent(wire)) == self.frame()

    @pytest.mark.parametrize("plain", [True, False])
    @pytest.mark.parametrize("buffers", [[], BUFFERS])
    @pytest.mark.parametrize("objects", [None, Objects(("a", "b"), (1,))])
    @pytest.mark.parametrize("hops", [0, 1])
    def test_a_frame_arrives_whole(self, plain, buffers, objects, hops):
        wire = to_wire(self.frame(buffers, objects), plain)
        for _ in range(hops):
            wire = passed_on(self.sent(wire), plain)
        got = from_wire(self.sent(wire))
        assert [bytes(each) for each in got.buffers] == [bytes(each) for each in buffers]
        assert got.objects == objects
        assert (got.kind, got.session, got.src, got.call_id) == (Kind.CALL, 7, 3, 9)
        assert got.data == b"payload"

    @pytest.mark.parametrize("objects", [None, Objects(("a",))])
    def test_a_plain_form_has_no_buffers_out_of_band(self, objects):
        """Ray Client pickles without them."""
        wire = to_wire(self.frame(BUFFERS, objects), plain=True)
        assert type(wire) is tuple
        assert {type(part) for part in wire} <= {bytes, tuple}
        mixed = passed_on(self.sent(to_wire(self.frame(BUFFERS, objects))), plain=True)
        assert mixed == wire

    def test_buffers_are_not_copied_into_the_form_that_ray_sends(self):
        array = np.zeros(1 << 16, np.uint8)
        _, buffer = to_wire(self.frame([array]))
        array[0] = 7
        assert buffer.raw()[0] == 7


class TestAddress:
    def test_an_endpoint_that_has_ended_is_a_value_error(self, monkeypatch):
        for error in (ValueError("no such actor"), AssertionError(), RaySystemError("ending")):

            def fail(name, namespace, error=error):
                assert (name, namespace) == ("alice", "names")
                raise error

            monkeypatch.setattr(ray_api, "get_actor", fail)
            with pytest.raises(ValueError, match=r"no such actor|ending|^$"):
                Address("alice", "names").find()


def test_a_process_has_the_endpoint_that_it_was_given(monkeypatch, endpoint):
    monkeypatch.setattr(endpoint_module, "_hosted", None)
    assert endpoint_module.hosted_endpoint() is None
    assert endpoint_module.hosted_endpoint(endpoint) is endpoint
    assert endpoint_module.hosted_endpoint() is endpoint
