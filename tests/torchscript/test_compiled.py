"""Compiled functions and methods that call RPC run their Python code; all others stay compiled."""

import threading

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from conftest import run_in_threads
from torch import Tensor
from torch.autograd.profiler_legacy import profile as legacy_profile
from torch.distributed.rpc import functions
from torch.futures import Future
from torch.profiler import ProfilerActivity, profile

from rayrpc._observe.kineto import KinetoHook
from rayrpc._observe.profiler import ProfilerHook

WAIT = 60.0


@pytest.fixture
def add(installed):
    @torch.jit.script
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    return add


@pytest.fixture
def call(worker_b, add):
    @torch.jit.script
    def call(to: str, x: Tensor, times: int = 2) -> Tensor:
        for _ in range(times):
            x = rpc.rpc_sync(to, add, (x, x))
        return x

    return call


class TestFunctions:
    def test_one_that_calls_rpc_calls_it(self, call):
        assert call("b", torch.ones(1)).item() == 4
        assert call("b", x=torch.ones(1), times=3).item() == 8

    def test_its_arguments_are_checked_as_torch_does(self, call):
        with pytest.raises(RuntimeError, match=r"call\(\) Expected a value of type 'str'"):
            call(3, torch.ones(1))
        with pytest.raises(RuntimeError, match=r"call\(\) is missing value for argument 'x'"):
            call("b")
        with pytest.raises(RuntimeError, match=r"expected at most 3 argument\(s\) but received 4"):
            call("b", torch.ones(1), 1, 1)

    def test_it_is_still_a_compiled_function(self, call, worker_b):
        call("b", torch.ones(1))
        assert isinstance(call, torch.jit.ScriptFunction)
        assert "prim::rpc_sync" in str(call.graph)

        @torch.jit.script
        def call_it(x: Tensor) -> Tensor:
            return call("b", x, 1) + 1

        assert call_it(torch.ones(1)).item() == 3

    def test_one_that_does_not_is_torchs_own_from_its_first_call_on(self, add):
        assert add(torch.ones(1), torch.ones(1)).item() == 2
        assert type(add) is torch._C.ScriptFunction

    def test_it_may_be_called_before_by_other_compiled_code(self, add):
        @torch.jit.script
        def add_twice(x: Tensor) -> Tensor:
            return add(add(x, x), x)

        assert add_twice(torch.ones(1)).item() == 3

    def test_a_function_that_is_compiled_again_is_the_same(self, worker_b, add):
        def call(to: str) -> Tensor:
            return rpc.rpc_async(to, add, (torch.ones(1), torch.ones(1))).wait()

        assert torch.jit.script(call)("b").item() == 2
        assert torch.jit.script(call)("b").item() == 2

    def test_threads_may_call_one_first_at_the_same_time(self, worker_b, add, quick_switches):
        @torch.jit.script
        def call(to: str, x: Tensor) -> Tensor:
            return rpc.rpc_sync(to, add, (x, x))

        results: list[float] = []
        barrier = threading.Barrier(4)

        def run(x):
            barrier.wait(WAIT)
            results.append(call("b", torch.full((1,), x)).item() + add(x, x))

        run_in_threads(run, [(torch.tensor(float(x)),) for x in range(4)], WAIT)
        assert sorted(results) == [0, 4, 8, 12]

    def test_one_runs_on_another_worker(self, worker_a, call):
        assert worker_a.sync("b", call, "b", torch.ones(1)).item() == 4
        assert worker_a.remote("b", call, "b", torch.ones(1)).to_here().item() == 4

    def test_rrefs_go_in_and_out(self, worker_b):
        @torch.jit.script
        def double(rref: rpc.RRef[Tensor]) -> Tensor:
            return rref.to_here() * 2

        @torch.jit.script
        def same(rref: rpc.RRef[Tensor]) -> rpc.RRef[Tensor]:
            return rref

        rref = rpc.remote("b", torch.ones, args=(2,))
        assert double(rref).tolist() == [2, 2] and same(rref) is rref
        assert rpc.rpc_sync("b", double, args=(rref,)).tolist() == [2, 2]

    def test_what_it_asks_of_an_rref_is_what_rrefs_say(self, worker_b):
        @torch.jit.script
        def ask(rref: rpc.RRef[int]) -> tuple[bool, str, bool]:
            return rref.is_owner(), rref.owner_name(), rref.confirmed_by_owner()

        assert ask(rpc.RRef(3)) == (True, "a", True)
        assert ask(rpc.remote("b", int))[:2] == (False, "b")

    def test_a_value_that_is_elsewhere_is_torchs_error(self, worker_b):
        @torch.jit.script
        def local(rref: rpc.RRef[int]) -> int:
            return rref.local_value()

        assert local(rpc.RRef(3)) == 3
        with pytest.raises(RuntimeError, match=r"Can't call RRef\.local_value\(\) on a non-owner"):
            local(rpc.remote("b", int))

    def test_futures_go_in_and_out(self, worker_b, add):
        @torch.jit.script
        def wait(future: Future[Tensor]) -> Tensor:
            return future.wait()

        @torch.jit.script
        def begin(to: str) -> Future[Tensor]:
            return rpc.rpc_async(to, add, (torch.ones(1), torch.ones(1)))

        assert wait(begin("b")).item() == 2
        assert wait(rpc.rpc_async("b", torch.ones, args=(1,))).item() == 1

    def test_a_fork_in_it_calls_too(self, call):
        @torch.jit.script
        def fork(to: str, x: Tensor) -> Tensor:
            futures = [torch.jit.fork(call, to, x) for _ in range(2)]
            return torch.jit.wait(futures[0]) + torch.jit.wait(futures[1])

        assert fork("b", torch.ones(1)).item() == 8

    def test_an_ignored_part_is_python(self, worker_b):
        @torch.jit.ignore
        def pick(rref: rpc.RRef[Tensor]) -> rpc.RRef[Tensor]:
            return [rref, rref].pop()

        @torch.jit.script
        def fetch(rref: rpc.RRef[Tensor]) -> Tensor:
            return pick(rref).to_here()

        assert fetch(rpc.remote("b", torch.ones, args=(1,))).item() == 1

    def test_it_is_scripting_where_it_was_compiled(self, worker_b):
        def helper() -> bool:
            return torch.jit.is_scripting()

        @torch.jit.ignore
        def python() -> bool:
            return torch.jit.is_scripting()

        def ask(rref: rpc.RRef[int]) -> tuple[bool, bool, bool]:
            if torch.jit.is_scripting():
                return True, helper(), python()
            return False, False, False

        assert torch.jit.script(ask)(rpc.RRef(3)) == (True, True, False)
        assert ask(rpc.RRef(3)) == (False, False, False) and not helper()

    def test_an_async_one_replies_when_its_future_is_done(self, worker_a, worker_b, add):
        @functions.async_execution
        @torch.jit.script
        def later(to: str, x: Tensor) -> Future[Tensor]:
            return rpc.rpc_async(to, add, (x, x))

        assert rpc.rpc_sync("b", later, args=("a", torch.ones(1))).item() == 2

    def test_gradients_flow_through_it(self, workers, installed, add):
        @torch.jit.script
        def call(to: str, x: Tensor) -> Tensor:
            return rpc.rpc_sync(to, add, (x, x))

        @torch.jit.script
        def backward(context: int, loss: Tensor):
            dist_autograd.backward(context, [loss])

        @torch.jit.script
        def gradients(context: int) -> dict[Tensor, Tensor]:
            return dist_autograd.get_gradients(context)

        x = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context:
            backward(context, call("alice", x).sum())
            assert gradients(context)[x].tolist() == [2, 2]


class TestErrors:
    def test_an_error_of_the_callee_is_raised(self, worker_b):
        @torch.jit.script
        def fails(x: Tensor) -> Tensor:
            raise RuntimeError("as expected")

        @torch.jit.script
        def call(to: str) -> Tensor:
            return rpc.rpc_sync(to, fails, (torch.ones(1),))

        with pytest.raises(RuntimeError, match="as expected"):
            call("b")

    def test_one_of_its_own_is_that_of_compiled_code(self, worker_b):
        @torch.jit.script
        def fails(rref: rpc.RRef[int]) -> int:
            if rref.to_here() == 0:
                raise ValueError("none is there")
            return 1

        with pytest.raises(torch.jit.Error, match="ValueError: none is there"):
            fails(rpc.remote("b", int))

    def test_rrefs_are_not_saved(self, worker_b, tmp_path):
        @torch.jit.script
        def save(rref: rpc.RRef[int], name: str):
            torch.save(rref, name)

        with pytest.raises(RuntimeError, match="jit pickling is only allowed inside RPC calls"):
            save(rpc.RRef(3), str(tmp_path / "rref"))


@torch.jit.ignore
def call_in_python(to: str, x: Tensor) -> Tensor:
    found: Tensor = rpc.rpc_sync(to, torch.mul, (x, x))
    return found


class TestProfiles:
    @pytest.fixture
    def mixed_call(self, call, add):
        @torch.jit.script
        def mixed_call(to: str, x: Tensor) -> Tensor:
            future = rpc.rpc_async(to, add, (x, x))
            return call_in_python(to, call(to, future.wait(), 1))

        return mixed_call

    def check(self, names, add):
        of_add = torch._jit_internal._qualified_name(add)
        assert sorted(name for name in names if name.endswith("(a -> b)")) == [
            f"rpc_async_jit#{of_add}(a -> b)",
            f"rpc_async_jit#{of_add}(a -> b)",
            f"rpc_sync#{of_add}(a -> b)",
            "rpc_sync#aten::mul(a -> b)",
        ]

    def test_its_calls_have_torchs_name_for_them(self, worker_a, worker_b, add, mixed_call):
        for node_id, worker in enumerate((worker_a, worker_b)):
            worker.agent.hooks.append(ProfilerHook(node_id))
        with legacy_profile() as recorded:
            assert mixed_call("b", torch.ones(1)).item() == 16
            rpc.rpc_sync("b", add, (torch.ones(1), torch.ones(1)))
        names = [event.name for event in recorded.function_events]
        self.check(names, add)
        of_add = torch._jit_internal._qualified_name(add)
        assert names.count(f"rpc_async_jit#{of_add}(a -> b)#remote_op: aten::add") == 2

    def test_so_they_have_in_profiles_of_kineto(self, worker_a, worker_b, add, mixed_call):
        worker_a.agent.hooks.append(KinetoHook(worker_a.agent.callee.around))
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            assert mixed_call("b", torch.ones(1)).item() == 16
            rpc.rpc_sync("b", add, (torch.ones(1), torch.ones(1)))
        self.check([event.name for event in recorded.events()], add)


@torch.jit.interface
class Forward:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[empty-body]
        pass


class TestInterfaces:
    @pytest.fixture
    def run(self, installed):
        @torch.jit.script
        def run(module: Forward, x: Tensor) -> Tensor:
            return module.forward(x)

        return run

    def test_a_module_that_calls_rpc_is_called_by_its_interface(self, worker_b, add, run):
        class Calls(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return rpc.rpc_sync("b", add, (x, x))

        assert run(torch.jit.script(Calls()), torch.ones(1)).item() == 2

    def test_another_stays_compiled(self, worker_b, run):
        class Negates(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return -x

        assert run(torch.jit.script(Negates()), torch.ones(1)).item() == -1

    def test_a_module_without_its_methods_is_refused(self, worker_b, add, run):
        class Other(torch.nn.Module):
            def forward(self) -> Tensor:
                return rpc.rpc_sync("b", add, (torch.ones(1), torch.ones(1)))

        with pytest.raises(RuntimeError, match="Expected a value of type"):
            run(torch.jit.script(Other()), torch.ones(1))

    def test_an_rref_of_a_module_has_its_interface(self, worker_b):
        class Negates(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return -x

        @torch.jit.script
        def run(rref: rpc.RRef[Forward], x: Tensor) -> Tensor:
            return rref.to_here().forward(x)

        rref = rpc.RRef(torch.jit.script(Negates()), Forward)
        assert run(rref, torch.ones(1)).item() == -1
