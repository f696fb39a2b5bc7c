"""The shim in a script's process, and in the processes that the script starts."""

import multiprocessing.spawn
import os
import pickle
import sys

import pytest
import torch.multiprocessing

from rayrpc import config
from rayrpc.errors import ConfigError
from rayrpc.launch import process
from rayrpc.launch.process import Shim, get_install, set_install

installs = []


def install():
    installs.append(config.settings().rpc_timeout)


def start_processes():
    raise AssertionError("not to be called")


@pytest.fixture
def shim(monkeypatch):
    """A shim of this test; what it changes is restored."""
    monkeypatch.setattr(config, "_current", None)
    monkeypatch.setattr(sys.modules[__name__], "installs", [])
    spawn_module = multiprocessing.spawn
    monkeypatch.setattr(spawn_module, "get_preparation_data", spawn_module.get_preparation_data)
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        for name in ("spawn", "start_processes"):
            monkeypatch.setattr(module, name, getattr(module, name))
    for name in ("PYTHONPATH", "RAYRPC_INTERNAL_SHIM"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return Shim({"rpc_timeout": 7.0}, install, start_processes)


def test_a_shim_puts_everything_in_place(shim):
    shim.enter()
    assert installs == [7.0]
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        assert module.spawn is module.start_processes is start_processes


def test_a_shim_pickles_by_reference(shim):
    assert pickle.loads(pickle.dumps(shim)) == shim
    pickle.loads(pickle.dumps(shim.enter))()
    assert installs == [7.0]


def test_a_child_enters_the_shim_when_it_unpickles_its_preparation_data(shim):
    shim.enter()
    config.use(config.Settings(rpc_timeout=8))  # as the script may
    data = multiprocessing.spawn.get_preparation_data("child")
    assert data["name"] == "child"
    assert pickle.loads(pickle.dumps(data["rayrpc"])) is None
    assert installs == [7.0, 8.0]


def test_a_shim_is_entered_again_without_harm(shim):
    shim.enter()
    shim.enter()
    data = multiprocessing.spawn.get_preparation_data("child")
    expected = Shim(config.settings().to_dict(), install, start_processes)
    assert data["rayrpc"] == process._Entry(expected)


def test_settings_that_are_not_valid_are_refused(shim):
    with pytest.raises(ConfigError, match="rpc_timeout"):
        Shim({"rpc_timeout": -1}, install, start_processes).enter()
    assert installs == []


def test_what_installs_rayrpc_is_known_while_it_is_installed(monkeypatch):
    monkeypatch.setattr(process, "_install", None)
    assert get_install() is None
    set_install(install)
    assert get_install() is install
    set_install(None)
    assert get_install() is None
