"""Contexts of workers, initializers, and numbers of tasks."""

import os
import threading

import pytest

from rayrpc.parallel.pickle import dumps
from rayrpc.parallel.pool import CtxPool, CtxPoolStorage, CtxThreadPool, proxy_ctx_caller

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


_setting = threading.local()


def set_up(value):
    _setting.value = value


def with_context(ctx, x, y=0):
    return ctx, x + y


def set_before():
    return _setting.value


def setting(ctx):
    return ctx, CtxPoolStorage.storage, _setting.value, os.getpid()


def test_a_worker_has_its_initializer_context_and_number_of_tasks():
    with CtxPool(1, set_up, (5,), maxtasksperchild=2, worker_contexts=["mine"]) as pool:
        seen = [pool.apply(setting) for _ in range(3)]
    assert [each[:3] for each in seen] == [("mine", "mine", 5)] * 3
    pids = [each[3] for each in seen]
    assert pids[0] == pids[1] != pids[2]


@pytest.mark.parametrize("kind", [CtxPool, CtxThreadPool])
def test_functions_get_the_context_first(kind):
    with pytest.raises(ValueError, match="not equal to the number"):
        kind(2, worker_contexts=[0, 1, 2])
    with kind(2, set_up, (3,), worker_contexts=["a", "b"]) as pool:
        xs = list(range(10))
        assert sorted(x for _, x in pool.map(with_context, xs)) == xs
        assert {ctx for ctx, _ in pool.imap(with_context, xs)} <= {"a", "b"}
        assert pool.starmap(with_context, [(1, 2)])[0][1] == 3
        assert pool.apply(with_context, (1,), {"y": 4})[1] == 5
        assert pool.apply(lambda ctx: set_before()) == 3


def test_the_default_context_is_none():
    with CtxThreadPool(1) as pool:
        assert pool.apply(with_context, (1,)) == (None, 1)


def test_proxy_ctx_caller_calls_with_the_context(monkeypatch):
    monkeypatch.setattr(CtxPoolStorage, "storage", "here")
    data = dumps(lambda ctx, x, y: (ctx, x, y))
    assert proxy_ctx_caller(data, (1,), {"y": 2}) == ("here", 1, 2)
    assert proxy_ctx_caller((data, (1,), {"y": 2})) == ("here", 1, 2)
