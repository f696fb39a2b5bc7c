"""Frames: how they are packed, what is refused when they are unpacked, and what they hold."""

import gc
import pickle
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.messages import (
    ChildAccept,
    Fork,
    ForkAck,
    ForkRequest,
    Frame,
    FrameError,
    Kind,
    Objects,
    Payload,
    SharedForks,
    UserDelete,
    flat,
    size_of,
)

RREF, FORK = GloballyUniqueId(1, 2), GloballyUniqueId(3, 4)
HEAD = struct.Struct("<BBiqQQ")  # kind, flags, src, session, call id, ack
HAS_IDS, HAS_MORE = 2, 4
RREF_KINDS = (Kind.REMOTE, Kind.FETCH)

words = some.integers(0, 2**64 - 1)
ids = some.builds(GloballyUniqueId, some.integers(-(2**63), 2**63 - 1), words)
forks = some.builds(Fork, ids, ids, some.integers(), some.integers())
controls = some.one_of(
    some.builds(ForkRequest, words, ids, ids),
    some.builds(ForkAck, words, ids),
    some.builds(ChildAccept, words, ids),
    some.builds(UserDelete, words, ids, ids),
)
metas = some.none() | some.dictionaries(some.text(max_size=3), some.integers(), max_size=2)


@some.composite
def frames(draw):
    kind = draw(some.sampled_from(Kind))
    rref_id = draw(ids if kind in RREF_KINDS else some.none() | ids)
    return Frame(
        kind,
        draw(some.integers(-(2**63), 2**63 - 1)),
        draw(some.integers(-(2**31), 2**31 - 1)),
        draw(words),
        rref_id=rref_id,
        fork_id=None if rref_id is None else draw(ids),
        is_async=draw(some.booleans()),
        meta=draw(metas),
        ack=draw(words),
        control=tuple(draw(some.lists(controls, max_size=2))),
        forks=tuple(draw(some.lists(forks, max_size=2))),
        data=draw(some.binary(max_size=40)),
        takes_slot=draw(some.booleans()),
    )


class TestPacking:
    @given(frames(), some.booleans())
    def test_a_frame_arrives_as_it_was_in_whatever_memory(self, sent, in_view):
        data = sent.pack()
        got = Frame.unpack(memoryview(data) if in_view else data)
        assert got == sent
        assert type(got.kind) is Kind and type(got.data) is bytes
        assert [type(each) for each in got.control] == [type(each) for each in sent.control]

    @given(frames(), some.data())
    def test_a_frame_that_was_cut_is_refused_or_has_less_data(self, sent, data):
        packed = sent.pack()
        length = data.draw(some.integers(0, len(packed) - 1))
        try:
            got = Frame.unpack(packed[:length])
        except FrameError:
            return
        assert sent.data.startswith(got.data) and len(got.data) < len(sent.data)

    def test_buffers_and_objects_are_beside_it(self):
        objects = Objects(("ref",))
        sent = Frame(Kind.CALL, 0, 1, 2, data=b"x", buffers=[b"large" * 1000], objects=objects)
        assert len(sent.pack()) == HEAD.size + 1
        got = Frame.unpack(sent.pack(), (bytearray(b"there"),), objects)
        assert got.buffers == [b"there"] and type(got.buffers) is list
        assert got.objects is objects
        assert Frame.unpack(sent.pack()).buffers == [] and Frame.unpack(sent.pack()).objects is None

    def test_a_fetch_needs_no_fork(self):
        sent = Frame(Kind.FETCH, 0, 1, 2, rref_id=RREF)
        assert Frame.unpack(sent.pack()).fork_id == RREF  # in place of one

    def test_a_plain_frame_is_its_header_and_its_data(self):
        sent = Frame(Kind.VALUE, -5, 3, 7, ack=9, data=b"data")
        assert sent.pack() == HEAD.pack(Kind.VALUE, 0, 3, -5, 7, 9) + b"data"

    def test_no_entry_of_hooks_and_empty_ones_are_two_things(self):
        for meta in (None, {}):
            assert Frame.unpack(Frame(Kind.CALL, 0, 1, 2, meta=meta).pack()).meta == meta

    def test_what_the_sender_alone_uses_is_neither_sent_nor_compared(self):
        sent = Frame(Kind.CALL, 0, 1, 2)
        sent.is_stable, sent.pending = True, object()
        got = Frame.unpack(sent.pack())
        assert got == sent and not got.is_stable and got.pending is None
        assert "pending" not in repr(sent)

    def test_frames_share_no_buffers(self):
        first, second = Frame(Kind.CALL, 0, 1), Frame(Kind.CALL, 0, 1)
        first.buffers.append(b"x")
        assert second.buffers == []


def packed(more, checksum=None, length=None):
    """Return a frame with a pickle of hooks' entries, RRef messages and forks."""
    checksum = zlib.crc32(more) if checksum is None else checksum
    length = len(more) if length is None else length
    head = HEAD.pack(Kind.CALL, HAS_MORE, 1, 0, 2, 0)
    return head + struct.pack("<II", length, checksum) + more


ran: list[str] = []


class Runs:
    def __reduce__(self):
        return ran.append, ("unpickled",)


class TestRefused:
    @pytest.mark.parametrize("length", [0, 1, HEAD.size - 1])
    def test_a_header_that_is_too_short(self, length):
        head = Frame(Kind.CALL, 0, 1).pack()[:length]
        with pytest.raises(FrameError, match=r"^the header of a frame is malformed: "):
            Frame.unpack(head)

    @pytest.mark.parametrize("kind", [len(Kind), 255])
    def test_an_unknown_kind(self, kind):
        with pytest.raises(FrameError, match="the header of a frame is malformed"):
            Frame.unpack(HEAD.pack(kind, 0, 1, 0, 2, 0))

    def test_an_unknown_flag(self):
        with pytest.raises(FrameError, match=r"^the flags of a frame do not fit its length$"):
            Frame.unpack(HEAD.pack(Kind.CALL, 16, 1, 0, 2, 0))

    @pytest.mark.parametrize("kind", RREF_KINDS)
    def test_a_frame_that_has_to_name_an_rref_and_does_not(self, kind):
        with pytest.raises(FrameError, match=r"^a frame names no RRef$"):
            Frame.unpack(HEAD.pack(kind, 0, 1, 0, 2, 0))

    def test_identities_that_are_cut(self):
        head = HEAD.pack(Kind.REMOTE, HAS_IDS, 1, 0, 2, 0)
        with pytest.raises(FrameError, match="the header of a frame is malformed"):
            Frame.unpack(head + bytes(31))

    def test_a_pickle_that_is_longer_than_the_frame(self):
        more = pickle.dumps((None, (), ()))
        with pytest.raises(FrameError):
            Frame.unpack(packed(more, length=len(more) + 1))

    def test_a_damaged_pickle_which_is_not_read(self):
        more = pickle.dumps((Runs(), (), ()))
        with pytest.raises(FrameError, match=r"^the RRef messages of a frame are damaged$"):
            Frame.unpack(packed(more, checksum=zlib.crc32(more) ^ 1))
        assert not ran

    @pytest.mark.parametrize("more", [b"no pickle", pickle.dumps(3), pickle.dumps((1, 2))])
    def test_a_pickle_of_something_else(self, more):
        match = "^the RRef messages of a frame cannot be unpickled: "
        with pytest.raises(FrameError, match=match):
            Frame.unpack(packed(more))

    def test_by_an_error_that_ends_a_connection(self):
        assert issubclass(FrameError, EOFError)


class TestForks:
    FORKS = (Fork(RREF, FORK, 1, 2), Fork(RREF, GloballyUniqueId(3, 5), 1, 2))

    def request(self, released):
        return Frame(Kind.CALL, 0, 1, forks=SharedForks.of(self.FORKS, released.append))

    def test_those_of_a_request_that_is_not_sent_are_released_each_once(self):
        released: list[Fork] = []
        frame = self.request(released)
        assert frame.forks == self.FORKS and frame.unsent_forks is frame.forks
        del frame
        gc.collect()
        assert released == list(self.FORKS)

    def test_those_of_one_that_may_arrive_are_not(self):
        released: list[Fork] = []
        frame = self.request(released)
        frame.begin_to_send()
        frame.begin_to_send()
        del frame
        gc.collect()
        assert released == []

    def test_a_transport_may_keep_them_without_the_frame(self):
        released: list[Fork] = []
        frame = self.request(released)
        forks = frame.unsent_forks
        del frame
        gc.collect()
        assert forks is not None and released == []
        forks.begin_to_send()
        del forks
        assert released == []

    def test_they_arrive_as_plain_ones(self):
        released: list[Fork] = []
        frame = self.request(released)
        got = Frame.unpack(frame.pack())
        assert got.forks == self.FORKS and got.unsent_forks is None
        del got
        gc.collect()
        assert released == []

    def test_those_of_a_reply_are_nobodys_to_release(self):
        frame = Frame(Kind.VALUE, 0, 1, forks=self.FORKS)
        assert frame.unsent_forks is None
        frame.begin_to_send()


class TestBuffers:
    @pytest.mark.parametrize("is_stable", [False, True])
    def test_they_are_copied_once_unless_they_are_stable(self, is_stable):
        memory = bytearray(b"first")
        frame = Frame(Kind.VALUE, 0, 1, buffers=[memory])
        frame.is_stable = is_stable
        frame.keep_buffers()
        kept = frame.buffers
        memory[:] = b"later"
        assert frame.buffers == [b"later" if is_stable else b"first"] and frame.is_stable
        frame.keep_buffers()
        assert frame.buffers is kept

    @pytest.mark.parametrize("order", ["C", "F"])
    def test_they_are_the_bytes_in_the_order_of_memory(self, order):
        array: Any = np.asarray(np.arange(6, dtype=np.int16).reshape(2, 3), order=order)
        made = flat(pickle.PickleBuffer(array))
        assert made.tobytes() == array.tobytes(order="A") and made.format == "B"
        assert size_of(Payload(b"not counted", [pickle.PickleBuffer(array), b"", b"xyz"])) == 15

    def test_a_view_of_larger_items_is_bytes_too(self):
        array: Any = np.arange(3, dtype=np.float64)
        made = flat(memoryview(array))
        assert (made.nbytes, made.itemsize, len(made)) == (24, 1, 24)

    def test_memory_with_gaps_is_refused(self):
        gaps: Any = np.arange(10)[::2]
        for buffer in (pickle.PickleBuffer(gaps), memoryview(gaps)):
            with pytest.raises((BufferError, TypeError)):
                flat(buffer)

    def test_an_empty_frame_has_none(self):
        assert size_of(Frame(Kind.CALL, 0, 1)) == 0 and flat(b"").nbytes == 0
