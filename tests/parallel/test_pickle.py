"""Bytes of objects, tensors by value and by reference."""

import io
import multiprocessing
import sys
import threading
import types
from typing import Any

import pytest
import torch

from rayrpc.parallel.pickle import Pickler, dumps, loads, mark_static_module

CONTEXT = multiprocessing.get_context("spawn")


def fill(data, value):
    """Change the tensor in ``data``, in a process of its own."""
    loads(data).fill_(value)


def test_tensors_are_copied_by_default():
    tensor = torch.rand(4)
    again = loads(dumps(tensor))
    again += 1
    assert torch.equal(again, tensor + 1)
    model = torch.nn.Linear(2, 2)
    same = loads(dumps(model))
    assert torch.equal(same.weight, model.weight) and isinstance(same.weight, torch.nn.Parameter)


@pytest.mark.parametrize("recurse", [False, True])
def test_local_functions_can_be_pickled(recurse):
    kept = torch.ones(2)

    def local(x):
        return x + kept

    assert torch.equal(loads(dumps(local, recurse=recurse))(1), torch.full((2,), 2.0))
    assert loads(dumps(lambda: 5, recurse=recurse))() == 5


def test_a_reference_is_the_same_memory_in_another_process():
    tensor = torch.zeros(4).share_memory_()
    process = CONTEXT.Process(target=fill, args=(dumps(tensor, copy_tensor=False), 3.0))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and torch.equal(tensor, torch.full((4,), 3.0))


def test_pickler_writes_to_a_file():
    file = io.BytesIO()
    Pickler(file, copy_tensor=True).dump({"t": torch.ones(1)})
    assert torch.equal(loads(file.getvalue())["t"], torch.ones(1))


def test_a_marked_module_is_pickled_by_its_name(monkeypatch):
    module: Any = types.ModuleType("made_by_hand")
    module.lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle"):
        dumps(module)
    mark_static_module(module)
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    assert loads(dumps(module)) is module
