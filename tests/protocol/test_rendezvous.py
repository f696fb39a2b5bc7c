"""Keys, ranks and world sizes from an init_method."""

import pytest
import torch

from rayrpc._protocol.origin import Origin
from rayrpc._protocol.rendezvous import find_place, is_name, owned_key

ENV = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("env://", "host:29500"),
        ("tcp://10.0.0.1:80", "10.0.0.1:80"),
        ("tcp://127.0.0.1:80", "localhost:80"),
        ("tcp://localhost:80", "localhost:80"),
        ("tcp://127.0.0.2:80", "localhost:80"),
        ("tcp://[::1]:80", "localhost:80"),
        ("tcp://0.0.0.0:80", "localhost:80"),
        ("file:///tmp/x", "file:/tmp/x"),
        ("ray://mine", "mine"),
        ("ray://localhost:80", "localhost:80"),
        ("ray://127.0.0.1:80", "localhost:80"),
    ],
)
def test_a_method_names_a_key(method, key):
    assert find_place(method, 0, 2, ENV, None).key == key


def test_rank_and_world_size_may_be_in_the_query():
    assert find_place("tcp://h:1?rank=1&world_size=3", -1, None, {}, None)[1:] == (1, 3)


def test_env_takes_the_rank_of_the_environment():
    assert find_place("env://", -1, None, {**ENV, "RANK": "2"}, None) == ("host:29500", 2, None)


def test_a_group_in_the_settings_needs_neither_address_nor_rank():
    assert find_place("env://", -1, None, {}, "mine") == ("mine", -1, None)
    assert find_place("env://", 0, None, ENV, "mine").key == "host:29500"


def test_a_named_group_needs_no_rank():
    assert find_place("ray://mine", -1, None, {}, None) == ("mine", -1, None)


@pytest.mark.parametrize(
    ("method", "environ", "text"),
    [
        ("env://", {}, "environment variable RANK expected, but not set"),
        ("env://", {"RANK": "0"}, "environment variable MASTER_ADDR expected"),
        ("env://", {"RANK": "0", "MASTER_ADDR": "h"}, "environment variable MASTER_PORT expected"),
        ("tcp://host:1", {}, "rank parameter missing"),
        ("tcp://host", {}, "port number missing"),
        ("file:///x", {}, "rank parameter missing"),
        ("file://", {}, "path missing"),
        ("ray://", {}, "name of the group missing"),
    ],
)
def test_a_missing_part_is_an_error_with_torchs_text(method, environ, text):
    with pytest.raises(ValueError, match=text):
        find_place(method, -1, None, environ, None)


def test_an_unknown_scheme_is_refused():
    with pytest.raises(RuntimeError, match="No rendezvous handler for ftp://"):
        find_place("ftp://x", 0, 1, {}, None)


@pytest.mark.parametrize("rank", [2, 3])
def test_a_rank_must_fit_the_world_size(rank):
    with pytest.raises(ValueError, match="not in the range of world_size 2"):
        find_place("tcp://h:1", rank, 2, {}, None)


def test_a_world_size_needs_a_rank():
    with pytest.raises(ValueError, match="without a rank"):
        find_place("ray://x", -1, 2, {}, None)


@pytest.mark.parametrize(
    ("method", "rank", "environ"),
    [
        ("env://", -1, {**ENV, "WORLD_SIZE": "2"}),
        ("env://", 0, {"MASTER_PORT": "1"}),
        ("env://", 0, {"MASTER_ADDR": "localhost"}),
        ("tcp://head", 0, {}),
        ("tcp://head:29500", -1, {}),
        ("file:///tmp/x", -1, {}),
        ("file://", 0, {}),
        ("abc://x", 0, {}),
    ],
)
def test_torch_raises_the_same_error(monkeypatch, method, rank, environ):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, RuntimeError)) as torchs:
        next(torch.distributed.rendezvous(method, rank, 2))
    with pytest.raises((ValueError, RuntimeError)) as ours:
        find_place(method, rank, 2, environ, None)
    assert (type(ours.value), str(ours.value)) == (type(torchs.value), str(torchs.value))


def test_a_key_is_its_users_and_a_loopback_ones_also_its_hosts():
    alice, there = Origin("alice", "h", "1"), Origin("alice", "h", "2")
    bob = Origin("bob", "h", "1")
    for key in ("head:29500", "file:/tmp/x", "mine", "localhost"):
        assert owned_key(key, alice) == owned_key(key, there) != owned_key(key, bob)
    assert len({owned_key("localhost:29500", each) for each in (alice, there, bob)}) == 3


@pytest.mark.parametrize(
    ("key", "expected"),
    [("mine", True), ("a/b:c", True), ("localhost:80", False), ("h:1", False), ("file:/x", False)],
)
def test_a_name_is_no_address(key, expected):
    assert is_name(key) is expected
