"""Tasks as they are encoded for a worker, and decoded in it."""

import pytest
import torch

from rayrpc.parallel.pool import task_codec
from rayrpc.parallel.pool.task_codec import (
    SentFunction,
    TaskDecoder,
    TaskEncoder,
    prepare_function,
)
from rayrpc.parallel.pool.tasks import mapstar


def task(func, *args):
    return (0, 0, prepare_function(func), args, {})


@pytest.fixture
def codec():
    return TaskEncoder(copy_tensors=True), TaskDecoder()


def run(sent, decoder):
    ((_, _, func, args, kwds),) = decoder.decode(sent)
    return func(*args, **kwds)


def test_an_importable_function_is_sent_by_name():
    assert prepare_function(max) is max and prepare_function(None) is None
    assert isinstance(prepare_function(lambda: 1), SentFunction)


def test_a_function_is_sent_once_and_by_its_key_afterwards(codec):
    encoder, decoder = codec
    func = prepare_function(lambda x: x + 1)
    sent = [encoder.encode([(0, index, func, (index,), {})]) for index in range(2)]
    assert [each[0][2].data is None for each in sent] == [False, True]
    assert [run(each, decoder) for each in sent] == [1, 2]
    encoder.forget()
    assert encoder.encode([(0, 2, func, (2,), {})])[0][2].data is not None


def test_a_worker_has_every_function_that_its_pool_believes_it_has(codec, monkeypatch):
    monkeypatch.setattr(task_codec, "MAX_FUNCTIONS", 2)
    encoder, decoder = codec
    funcs = [prepare_function(lambda x, n=n: x + n) for n in range(4)]
    for n in (0, 1, 0, 2, 0, 1, 3, 3, 2, 0):
        assert run(encoder.encode([(0, 0, funcs[n], (10,), {})]), decoder) == 10 + n


def test_tensors_in_a_chunk_are_copied(codec):
    encoder, decoder = codec
    tensor = torch.ones(2)
    chunk = (0, 0, mapstar, (prepare_function(lambda x: x.add_(1)), [tensor]), {})
    (result,) = run(encoder.encode([chunk]), decoder)
    assert result.tolist() == [2, 2] and tensor.tolist() == [1, 1]


def test_a_task_that_cannot_be_pickled_becomes_its_failed_result(codec):
    encoder, decoder = codec
    sent = encoder.encode([task(max, (each for each in ())), task(max, 1, 2)])
    failed, good = decoder.decode(sent)
    assert failed[:2] == (0, 0) and failed[2][0] is False
    assert good[2] is max
    error = failed[2][1]
    assert error.__traceback__ is None, "it would keep the variables of the pool's user"
