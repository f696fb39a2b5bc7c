"""How RRefs and references to objects leave a pickle and come back to it, thread by thread."""

import copyreg
import io
import pickle
import threading
from types import SimpleNamespace

import pytest
from conftest import run_in_threads

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.messages import Fork, Objects
from rayrpc._runtime.serialization.sessions import (
    ArgumentObject,
    Encoding,
    NoRRefs,
    reduce_argument,
    reduce_object,
    reduce_rref,
    session,
)
from rayrpc.errors import RpcError, SerializationError

OWNER = 9


class Ref:
    """Stands for an RRef, or for a reference to an object."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        raise RuntimeError(f"ref {self.number} cannot be pickled here")


class Sharer:
    """Shares ``Ref`` as forks of the same number; lends even ones to the owner."""

    def __init__(self):
        self.shared = []

    def share(self, rref, to, into):
        self.shared.append((rref.number, to))
        identity = GloballyUniqueId(0, rref.number)
        into.append(Fork(identity, identity, OWNER, 0))

    def lend(self, rref, to):
        is_lent = to == OWNER and rref.number % 2 == 0
        return GloballyUniqueId(5, rref.number) if is_lent else None

    def borrow(self, rref_id):
        return "borrowed", rref_id


@pytest.fixture
def sharer():
    return Sharer()


@pytest.fixture
def encode(sharer):
    """Return what pickles an object, with an ``Encoding`` that this thread uses meanwhile."""

    def encode(obj, to=OWNER, lends=True, reducer=reduce_rref):
        encoding = Encoding(sharer, to, lends, False, None)
        session.encoding = encoding
        try:
            return pickled(obj, reducer), encoding
        finally:
            session.encoding = None

    return encode


def pickled(obj, reducer):
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        Ref: reducer,
        ArgumentObject: reduce_argument,
    }
    pickler.dump(obj)
    return file.getvalue()


@pytest.fixture
def here():
    """What this thread decodes with; reset at the end."""
    yield session
    session.sharer = session.receive = session.reduce = session.encoding = None
    session.objects = ()


class TestRRefs:
    def test_forks_are_numbered_in_the_order_of_the_pickle(self, encode, sharer, here):
        data, encoding = encode([Ref(7), {"a": Ref(5)}, Ref(3)], to=2)
        assert sharer.shared == [(7, 2), (5, 2), (3, 2)]
        assert [fork.fork_id.local_id for fork in encoding.forks] == [7, 5, 3]
        here.receive = "rref {}".format
        assert pickle.loads(data) == ["rref 0", {"a": "rref 1"}, "rref 2"]

    def test_one_that_is_sent_twice_is_one(self, encode, here):
        rref = Ref(7)
        data, encoding = encode([rref, rref], to=2)
        assert len(encoding.forks) == 1
        here.receive = lambda position: object()
        first, second = pickle.loads(data)
        assert first is second

    def test_a_request_lends_what_it_may_and_forks_the_rest(self, encode, here):
        lent, forked = Ref(4), Ref(5)
        data, encoding = encode([lent, forked])
        assert encoding.lent == [lent] and [fork.fork_id.local_id for fork in encoding.forks] == [5]
        here.sharer, here.receive = Sharer(), "rref {}".format
        assert pickle.loads(data) == [("borrowed", GloballyUniqueId(5, 4)), "rref 0"]

    def test_a_reply_lends_nothing(self, encode):
        _, encoding = encode([Ref(4)], lends=False)
        assert not encoding.lent and len(encoding.forks) == 1

    @pytest.mark.parametrize("number", [4, 5], ids=["lent", "forked"])
    def test_they_arrive_with_a_call_alone(self, encode, number):
        data, _ = encode(Ref(number))
        with pytest.raises(RpcError, match=r"^An RRef can only be unpickled from an RPC that"):
            pickle.loads(data)

    def test_outside_of_a_call_they_are_pickled_by_their_own_rules(self):
        with pytest.raises(RuntimeError, match="ref 3 cannot be pickled here"):
            pickled(Ref(3), reduce_rref)

    def test_a_users_pickler_has_a_rule_of_its_own_also_within_a_call(self, encode, here):
        here.reduce = lambda rref: (divmod, (rref.number, 2))
        data, encoding = encode(Ref(7))
        assert pickle.loads(data) == (3, 1) and not encoding.forks


class TestObjects:
    def test_references_are_numbered_and_arguments_are_marked(self, encode, here):
        refs = [Ref(number) for number in range(3)]
        data, encoding = encode(
            [refs[0], ArgumentObject(refs[1]), (ArgumentObject(refs[2]),)], reducer=reduce_object
        )
        assert encoding.objects == Objects(tuple(refs), (1, 2))
        here.objects = ["ref", "value", "other value"]
        assert pickle.loads(data) == ["ref", "value", ("other value",)]

    def test_a_payload_without_references_has_no_objects(self, encode):
        assert encode([1])[1].objects is None

    def test_an_argument_and_a_reference_to_the_same_object_are_two(self, encode):
        ref = Ref(1)
        _, encoding = encode([ArgumentObject(ref), ref], reducer=reduce_object)
        assert encoding.objects == Objects((ref, ref), (0,))

    @pytest.mark.parametrize("count", [0, 1])
    def test_one_that_did_not_come_along_says_why(self, encode, here, count):
        data, _ = encode([Ref(1), Ref(2)], reducer=reduce_object)
        here.objects = ["ref"] * count
        with pytest.raises(
            RpcError, match=r"^An ObjectRef can only be .* an exception brings none"
        ):
            pickle.loads(data)

    def test_outside_of_a_call_they_are_pickled_by_their_own_rules(self):
        with pytest.raises(RuntimeError, match="ref 3 cannot be pickled here"):
            pickled(Ref(3), reduce_object)

    def test_arguments_are_made_in_calls_alone(self):
        with pytest.raises(AssertionError):
            pickled(ArgumentObject(Ref(1)), reduce_object)


def test_threads_pickle_and_unpickle_beside_one_another(sharer, encode, quick_switches):
    def send(to):
        for number in range(30):
            data, encoding = encode([Ref(2 * number + 1)], to=to)
            assert [fork.fork_id.local_id for fork in encoding.forks] == [2 * number + 1]
            session.receive = lambda position, to=to: (to, position)
            assert pickle.loads(data) == [(to, 0)]

    run_in_threads(send, [(to,) for to in range(4)], 60)
    assert session.encoding is None and session.receive is None  # this thread's
    assert len(sharer.shared) == 120


def test_a_new_thread_makes_and_reads_no_pickle(here):
    here.encoding, here.objects = SimpleNamespace(), ["ref"]
    seen = []

    def look():
        seen.append((session.encoding, session.sharer, session.receive, session.reduce))
        seen.append(tuple(session.objects))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    assert seen == [(None,) * 4, ()]


@pytest.mark.parametrize(
    "ask", ["share", "lend", "borrow", "unshare", "release_later", "receive", "discard"]
)
def test_where_no_rref_may_be_every_use_of_one_says_why(ask):
    none = NoRRefs("no RRefs in a checkpoint")
    with pytest.raises(SerializationError, match=r"^no RRefs in a checkpoint$"):
        getattr(none, ask)(Ref(1), None, [])
