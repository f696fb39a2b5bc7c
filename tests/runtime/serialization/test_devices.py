"""Device maps: what goes to which device, without a GPU.

The device "meta" stands for another one: tensors can be put there, and lose their values.
"""

from typing import Any

import pytest
import torch
from memory_workers import WAIT, MemoryWorker

from rayrpc._protocol.membership import Member
from rayrpc._runtime.serialization import devices
from rayrpc._runtime.serialization.codec import Codec
from rayrpc._runtime.serialization.devices import DeviceRoutes
from rayrpc._runtime.serialization.tensors import NoDeviceError
from rayrpc._transports.memory import MemoryHub
from rayrpc.errors import DeviceMapError

NO_RREFS: Any = None  # none are sent here
CPU, META = torch.device("cpu"), torch.device("meta")


def through(obj, device_map):
    codec = Codec(NO_RREFS)
    payload = codec.encode(obj, 1, True, device_map)
    return codec.decode(payload.data, payload.buffers, payload.forks)


class TestRoutes:
    def routes(self):
        routes = DeviceRoutes("me", {"you": {CPU: META}, "nobody": {}})
        maps = {"me": {"cuda:1": "cuda:0", "cpu": "cpu"}, "other": {"cuda:0": "cuda:0"}}
        routes.add(Member("t", "you", 7, extra={"device_maps": maps}))
        routes.add(Member("u", "they", 8))
        return routes

    def test_calls_go_by_the_map_of_the_caller(self):
        assert self.routes().of_calls("you") == {CPU: META}
        assert self.routes().of_calls("nobody") is self.routes().of_calls("they") is None

    def test_results_go_by_the_reverse_of_the_callers_map(self):
        back = self.routes().of_results(7)
        assert back == {torch.device("cuda:0"): torch.device("cuda:1"), CPU: CPU}
        assert self.routes().of_results(8) is None

    def test_an_id_that_is_taken_again_has_the_maps_of_its_new_holder(self):
        routes = self.routes()
        routes.add(Member("v", "she", 7))
        assert routes.of_results(7) is None


class TestTravelling:
    @pytest.mark.parametrize("size", [2, 100_000])
    def test_tensors_go_to_the_device_that_the_map_names(self, size):
        got = through({"a": [torch.ones(size)], "b": (1, "x")}, {CPU: META})
        assert got["a"][0].device == META and got["a"][0].shape == (size,) and got["b"] == (1, "x")

    def test_without_a_move_the_values_arrive(self):
        tensor = torch.arange(6.0).view(2, 3).t()
        got = through(tensor, {CPU: CPU})
        assert got.device == CPU and torch.equal(got, tensor) and got.stride() == tensor.stride()

    def test_tensors_of_the_cpu_stay_there_if_the_map_does_not_name_it(self):
        assert through(torch.ones(2), {META: CPU}).device == CPU

    @pytest.mark.parametrize("requires_grad", [True, False])
    def test_leaves_keep_requires_grad(self, requires_grad):
        leaf = torch.ones(3, requires_grad=requires_grad)
        got = through(leaf, {CPU: META})
        assert got.requires_grad is requires_grad and got.is_leaf

    def test_modules_and_parameters_move_as_well(self):
        got = through(torch.nn.Linear(3, 2), {CPU: META})
        assert {p.device for p in got.parameters()} == {META}
        assert all(p.requires_grad for p in got.parameters())

    def test_what_goes_by_value_moves_as_well(self):
        tensor = torch.ones(2)
        got = through(lambda: tensor, {CPU: META})
        assert got().device == META

    def test_sparse_tensors_move_by_their_dense_parts(self):
        got = through(torch.eye(3).to_sparse(), {CPU: CPU})
        assert torch.equal(got.to_dense(), torch.eye(3))

    @pytest.mark.parametrize("device_map", [{CPU: CPU}, {META: CPU}])
    def test_a_device_that_the_map_does_not_name_is_refused(self, monkeypatch, device_map):
        monkeypatch.setattr(devices, "_UNMAPPED", ())
        source = torch.ones(2, device=META if CPU in device_map else CPU)
        with pytest.raises(NoDeviceError) as caught:
            through([source], device_map)
        assert caught.value.device == source.device


def same(value):
    return value


def ones(device):
    return torch.ones(2, device=device)


def device_of(tensor):
    return str(tensor.device)


class TestCalls:
    @pytest.fixture
    def pair(self):
        hub = MemoryHub()
        maps = {"bob": {"cpu": "meta"}}
        alice = MemoryWorker(
            hub,
            "alice",
            extra={"device_maps": maps, "device_count": 0},
            device_maps={"bob": {torch.device("cpu"): torch.device("meta")}},
        )
        bob = MemoryWorker(hub, "bob")
        yield alice, bob
        for worker in (alice, bob):
            worker.agent.shutdown()

    def test_arguments_go_by_the_map(self, pair):
        alice, bob = pair
        assert alice.sync(bob, device_of, torch.ones(2)) == "meta"
        assert alice.future(bob, device_of, torch.ones(2)).wait() == "meta"
        assert alice.remote(bob, device_of, torch.ones(2)).to_here() == "meta"
        assert bob.sync(alice, device_of, torch.ones(2)) == "cpu"

    def test_results_without_a_place_are_refused_by_name(self, pair, monkeypatch):
        alice, bob = pair
        monkeypatch.setattr(devices, "_UNMAPPED", ())
        with pytest.raises(DeviceMapError, match=r"Response device mapping is not .* alice .* cpu"):
            alice.sync(bob, ones, "cpu")
        rref = alice.remote(bob, ones, "cpu")
        with pytest.raises(DeviceMapError, match=r"Response device mapping is not .* alice .* cpu"):
            rref.to_here(WAIT)

    def test_arguments_without_a_place_are_refused_by_name(self, pair, monkeypatch):
        alice, bob = pair
        monkeypatch.setattr(devices, "_UNMAPPED", ())
        tensor = torch.ones(2, device="meta")
        for call in (alice.sync, alice.future, alice.remote):
            with pytest.raises(DeviceMapError, match=r"set_device_map.* Request .* bob .* meta"):
                call(bob, same, tensor)
