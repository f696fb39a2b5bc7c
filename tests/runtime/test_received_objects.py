"""Objects among the arguments of a call: one callback for all, with values or the first error."""

import itertools
import threading

import pytest

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._concurrency.promise import Promise
from rayrpc._protocol.messages import Objects
from rayrpc._runtime.objects import NoStore, receive, ref_of
from rayrpc.errors import RpcError


class Store(NoStore):
    """An object store in memory, whose references are promises."""

    def when_ready(self, ref, callback):
        ref.on_done(callback)

    def put(self, outcome):
        made = Promise()
        made.set(outcome)
        return made

    def promise(self):
        made = Promise()
        return made, made.set


def waiting(count, arguments):
    refs = tuple(Promise() for _ in range(count))
    outcomes = []
    receive(Store(), Objects(refs, arguments), outcomes.append)
    return refs, outcomes


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_references_that_are_arguments_become_values(order):
    refs, outcomes = waiting(4, (0, 1, 3))
    arguments = [refs[0], refs[1], refs[3]]
    for position in order:
        assert not outcomes
        arguments[position].set(Value(position))
    assert outcomes == [Value([0, 1, refs[2], 2])]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_first_error_is_that_of_all(order):
    refs, outcomes = waiting(3, (0, 1, 2))
    ends = [Value(1), Error(ValueError("first")), Error(ValueError("second"))]
    for position in order:
        refs[position].set(ends[position])
    first = next(ends[position] for position in order if position)
    assert outcomes == [first]


def test_it_is_called_once_whatever_the_threads_do(quick_switches):
    for _ in range(200):
        refs, outcomes = waiting(4, (0, 1, 2, 3))
        threads = [
            threading.Thread(target=ref.set, args=(Value(n) if n else Error(KeyError()),))
            for n, ref in enumerate(refs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(outcomes) == 1


def test_a_reference_of_what_is_done_or_comes_later():
    source = Promise()
    later = ref_of(Store(), source)
    assert not later.is_done
    source.set(Value(1))
    assert later.value == Value(1)
    assert ref_of(Store(), source).value == Value(1)


def test_where_there_is_no_cluster_there_is_no_store():
    store = NoStore()
    outcomes = []
    store.when_ready(object(), outcomes.append)
    assert isinstance(outcomes[0].error, RpcError)
    for use in (lambda: store.put(Value(1)), store.promise, lambda: store.check(1)):
        with pytest.raises(RpcError, match="no Ray cluster"):
            use()
    assert store.at_hand(object()) is None
    store.close()
