"""Identities of workers, RRefs and forks."""

import pickle

import pytest
import torch.distributed.rpc as torch_rpc

from rayrpc._protocol.ids import GloballyUniqueId, IdSource, WorkerInfo


@pytest.mark.parametrize("name", ["a*", " ", "", "x" * 128])
def test_invalid_names_are_refused_as_torch_does(name):
    with pytest.raises(RuntimeError) as ours:
        WorkerInfo(name, 0)
    with pytest.raises(RuntimeError) as theirs:
        torch_rpc.WorkerInfo(name, 0)
    # torch's text for a long name is about its length alone
    assert "shorter than 128" in str(ours.value) and "shorter than 128" in str(theirs.value)
    assert name == "x" * 128 or str(ours.value) == str(theirs.value).splitlines()[0]


@pytest.mark.parametrize("name", ["a", "Trainer:3", "a_b-c", "x" * 127])
def test_valid_names_are_kept(name):
    info = WorkerInfo(name, 3)
    assert (info.name, info.id) == (name, 3)
    assert repr(info) == f"WorkerInfo(id=3, name={name})"


def test_worker_infos_are_immutable_and_compare_by_value():
    a, b = WorkerInfo("a", 0), WorkerInfo("a", 0)
    assert a == b and hash(a) == hash(b) and a != WorkerInfo("a", 1) and a != 3
    assert pickle.loads(pickle.dumps(a)) == a
    with pytest.raises(AttributeError):
        a.name = "b"


def test_identities_differ_from_those_of_an_earlier_worker_with_the_same_id():
    first, second = IdSource(1), IdSource(1, epoch=1)
    ids = {first.new() for _ in range(100)} | {second.new() for _ in range(100)}
    assert len(ids) == 200
    assert str(GloballyUniqueId(1, 2)) == "GloballyUniqueId(created_on=1, local_id=2)"
