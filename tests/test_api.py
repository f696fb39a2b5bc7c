"""Calls between this process, which is attached, and hosted workers."""

import functools
import os
import threading
from typing import Any, cast

import pytest
import targets
import torch

import rayrpc as rpc
from rayrpc import errors


@pytest.mark.parametrize("to", ["alice", 1, "info"])
def test_a_destination_is_a_name_a_rank_or_a_worker_info(workers, to):
    to = rpc.get_worker_info("alice") if to == "info" else to
    to = rpc.get_worker_info("alice").id if to == 1 else to
    assert rpc.rpc_sync(to, targets.whoami) == "alice"


def test_the_three_ways_to_call_give_the_same_value(workers):
    args = (torch.ones(2), 2)
    for value in (
        rpc.rpc_sync("alice", torch.add, args=args),
        rpc.rpc_async("alice", torch.add, args=args).wait(),
        rpc.remote("alice", torch.add, args=args).to_here(),
    ):
        assert torch.equal(value, torch.full((2,), 3.0))


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (min, (3, 2), 2),
        (targets.add, (1, 2), 3),
        (targets.Adder.static, (4,), 8),
        (targets.Adder.named, (4,), ("Adder", 4)),
        (targets.Point(2).moved, (3,), 5),
        (targets.Point, (7,), 7),
        (lambda x: x * 3, (2,), 6),
        (functools.partial(targets.add, y=5), (1,), 6),
    ],
    ids=["builtin", "function", "static", "class", "bound", "constructor", "lambda", "partial"],
)
def test_what_can_be_called(workers, func, args, expected):
    result = rpc.rpc_sync("bob", func, args=args)
    assert (result.x if isinstance(result, targets.Point) else result) == expected


def test_a_closure_takes_its_variables_along(workers):
    offset = 10

    def shifted(x):
        return x + offset

    assert rpc.rpc_sync("alice", shifted, args=(1,)) == 11


def test_scripted_functions_run_on_the_callee(workers):
    result = rpc.rpc_sync("alice", targets.scripted_add, args=(torch.ones(2), torch.ones(2)))
    assert torch.equal(result, torch.full((2,), 2.0))


def test_keyword_arguments_arrive(workers):
    assert rpc.rpc_sync("alice", targets.add, args=(1,), kwargs={"y": 4}) == 5


def test_calls_to_oneself_work_and_copy(workers):
    value = [1]
    back = rpc.rpc_sync("driver", targets.identity, args=(value,))
    assert back == value and back is not value
    tensor = torch.zeros(5000)
    back = rpc.rpc_sync("driver", targets.identity, args=(tensor,))
    back.add_(1)
    assert tensor.sum() == 0
    assert rpc.remote("driver", targets.add, args=(1, 2)).local_value() == 3


def test_module_state_set_by_one_call_is_seen_by_the_next(workers):
    first = rpc.rpc_sync("alice", targets.count)
    assert rpc.rpc_sync("alice", targets.count) == first + 1
    assert rpc.rpc_sync("bob", targets.call_on, args=("alice", targets.count)) == first + 2


def test_functions_run_in_the_workers_own_process(workers):
    pids = {rpc.rpc_sync(name, targets.pid) for name in workers}
    assert len(pids) == 2 and os.getpid() not in pids


def test_workers_call_back_into_the_driver(workers):
    assert rpc.rpc_sync("alice", targets.call_on, args=("driver", targets.pid)) == os.getpid()


def test_calls_nest_deeply(workers):
    chain = ["bob", "alice", "driver", "bob", "alice"]
    func: Any = targets.whoami
    args: tuple[Any, ...] = ()
    for name in chain:
        func, args = targets.call_on, (name, func, *args)
    assert rpc.rpc_sync("alice", func, args=args) == "bob"


def test_received_tensors_are_writable_and_private(workers):
    for size in (4, 500_000):
        sent = torch.zeros(size)
        received = rpc.rpc_sync("alice", targets.identity, args=(sent,))
        received.add_(1)
        assert sent.sum() == 0 and received.sum() == size
        rpc.rpc_sync("alice", targets.keep, args=("t", sent))
        rpc.rpc_sync("alice", targets.kept, args=("t",)).add_(1)
        assert rpc.rpc_sync("alice", targets.kept, args=("t",)).sum() == 0


def test_futures_run_their_callbacks(workers):
    future = rpc.rpc_async("alice", targets.add, args=(1, 1)).then(lambda f: f.wait() * 10)
    assert future.wait() == 20
    assert type(rpc.rpc_async("alice", targets.add, args=(1,))) is torch.futures.Future


def test_a_callback_may_wait_for_another_call(workers):
    def again(future):
        return (
            rpc.rpc_async("bob", targets.add, args=(future.wait(), 1))
            .then(lambda f: f.wait() + 1)
            .wait()
        )

    futures = [rpc.rpc_async("alice", targets.add, args=(i,)).then(again) for i in range(40)]
    assert [f.wait() for f in futures] == [i + 3 for i in range(40)]


def test_wait_all_waits_at_the_end_of_its_context(workers):
    with rpc._wait_all():
        futures = [rpc.rpc_async("alice", targets.nap, args=(0.05, i)) for i in range(3)]
    assert [f.done() for f in futures] == [True] * 3
    with pytest.raises(ValueError, match="as expected"), rpc._wait_all():
        rpc.rpc_async("alice", targets.fail)


def test_async_execution_chains_calls_on_the_callee(workers):
    for mode in (rpc.rpc_sync, lambda *a, **k: rpc.remote(*a, **k).to_here()):
        result = mode("alice", targets.chained, args=("bob", torch.ones(2), 1, 1))
        assert torch.equal(result, torch.full((2,), 3.0))


def test_async_execution_decorates_functions_alone():
    with pytest.raises(TypeError, match="async_execution decorates a callable, not 5"):
        rpc.functions.async_execution(cast(Any, 5))


def test_async_execution_holds_no_thread_while_it_waits(workers):
    # three times the threads of a worker: all must be there before the first is answered
    futures = [rpc.rpc_async("alice", targets.wait_for_all, args=(48,)) for _ in range(48)]
    assert [f.wait() for f in futures] == [48] * 48


def test_blocking_calls_beyond_the_worker_threads_are_queued(workers):
    futures = [rpc.rpc_async("alice", targets.nap, args=(0.02, i)) for i in range(60)]
    assert [f.wait() for f in futures] == list(range(60))


def test_many_threads_may_call_at_once(workers):
    results = []

    def work():
        results.extend(rpc.rpc_sync("alice", targets.add, args=(i,)) for i in range(20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(list(range(1, 21)) * 8)


class TestErrors:
    def test_a_users_error_keeps_its_type_and_brings_its_traceback(self, workers):
        with pytest.raises(ValueError, match="as expected") as caught:
            rpc.rpc_sync("alice", targets.fail)
        text = str(caught.value)
        assert "name=alice" in text and "in fail" in text

    def test_a_type_that_cannot_be_rebuilt_becomes_a_runtime_error(self, workers):
        with pytest.raises(RuntimeError, match="Original exception on remote side was") as caught:
            rpc.rpc_sync("alice", targets.fail_picky)
        assert "Picky" in str(caught.value) and "picky error" in str(caught.value)

    def test_system_exit_of_a_function_ends_neither_side(self, workers):
        with pytest.raises(RuntimeError, match="SystemExit"):
            rpc.rpc_sync("alice", targets.leave_thread)
        assert rpc.rpc_sync("alice", targets.whoami) == "alice"

    def test_an_unknown_worker_is_named_with_those_there_are(self, workers):
        with pytest.raises(RuntimeError, match=r"could not find destination carol.*alice"):
            rpc.rpc_sync("carol", targets.whoami)

    @pytest.mark.parametrize("to", [0.5, None, object()])
    def test_a_destination_of_a_wrong_type_is_a_value_error(self, workers, to):
        with pytest.raises(ValueError, match="Cannot get WorkerInfo from name"):
            rpc.rpc_sync(to, targets.whoami)

    def test_what_cannot_be_called_is_a_type_error(self, workers):
        not_callable: Any = 5
        with pytest.raises(TypeError, match="function should be callable"):
            rpc.rpc_sync("alice", not_callable)

    @pytest.mark.parametrize(("timeout", "error"), [(-5, ValueError), ("1", TypeError)])
    def test_a_wrong_timeout_is_refused(self, workers, timeout, error):
        with pytest.raises(error, match="timeout must be"):
            rpc.rpc_sync("alice", targets.whoami, timeout=timeout)

    def test_an_argument_that_cannot_be_sent_names_worker_and_function(self, workers):
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(errors.SerializationError, match=r"identity.*'alice'"):
                call("alice", targets.identity, args=(threading.Lock(),))

    def test_a_result_that_cannot_be_sent_names_the_worker(self, workers):
        with pytest.raises(errors.SerializationError, match="alice"):
            rpc.rpc_sync("alice", threading.Lock)

    def test_a_function_missing_on_the_callee_is_named(self, workers, monkeypatch):
        only_here = functools.wraps(targets.pid)(lambda: 1)
        only_here.__name__ = only_here.__qualname__ = "only_here"
        monkeypatch.setattr(targets, "only_here", only_here, raising=False)
        with pytest.raises(RuntimeError, match="RPC pickler does not serialize"):
            rpc.rpc_sync("alice", only_here)

    def test_a_future_needs_async_execution_to_be_returned(self, workers):
        with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
            rpc.rpc_sync("alice", targets.plain_future)
        with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
            rpc.rpc_sync("alice", targets.no_future)

    def test_operators_with_wrong_arguments_fail_in_torchs_words(self, workers):
        with pytest.raises(RuntimeError, match="failed to match any schema"):
            rpc.rpc_sync("alice", torch.add, args=())


class TestTimeouts:
    def test_a_call_that_takes_too_long_times_out(self, workers):
        for call in (rpc.rpc_sync, lambda *a, **k: rpc.rpc_async(*a, **k).wait()):
            with pytest.raises(RuntimeError, match=r"RPC ran for more than set timeout \(100 ms\)"):
                call("alice", targets.wait_until_kept, args=("timed out",), timeout=0.1)
        rpc.rpc_sync("alice", targets.keep, args=("timed out", True))  # both calls ran until now

    def test_zero_is_no_timeout_and_the_default_can_be_set(self, workers):
        rpc._set_rpc_timeout(0.05)
        try:
            assert rpc.get_rpc_timeout() == 0.05
            with pytest.raises(errors.CallTimeoutError):
                rpc.rpc_sync("alice", targets.nap, args=(0.5,))
            assert rpc.rpc_sync("alice", targets.nap, args=(0.2, 1), timeout=0) == 1
        finally:
            rpc._set_rpc_timeout(60)

    def test_rref_proxies_have_timeouts(self, workers):
        rref = rpc.remote("alice", targets.Adder, args=(1,))
        rref.rpc_sync().add(1)  # it exists on its owner
        for mode in ("rpc_sync", "rpc_async"):
            with pytest.raises(errors.CallTimeoutError):
                result = getattr(rref, mode)(timeout=0.2).slow(1)
                result.wait()


def test_gathering_gives_every_worker_all_objects(workers):
    futures = [
        rpc.rpc_async(name, targets.gather, args=(name, ["alice", "bob", "driver"]))
        for name in workers
    ]
    mine = rpc._all_gather("driver", {"alice", "bob", "driver"})
    assert mine == {"alice": "alice", "bob": "bob", "driver": "driver"}
    assert all(f.wait() == mine for f in futures)


def test_debug_info_has_torchs_keys_apart(workers):
    info = rpc._get_debug_info()
    assert {"num_owner_rrefs", "num_pending_users", "agent.thread_pool_size"} <= info.keys()
    assert all(isinstance(value, str) for value in info.values())


def test_tables_for_notebooks_show_the_members(workers):
    html = rpc._get_current_rpc_agent()._repr_html_()
    assert all(name in html for name in (*workers, "driver"))
    assert "alice" in rpc.get_worker_info("alice")._repr_html_()


def test_a_future_that_the_program_completes_itself_harms_no_call(workers):
    """As in torch, where the reply is then ignored."""
    for number in range(5):
        future = rpc.rpc_async("alice", targets.nap, args=(0.05, "late"))
        future.set_result(number)
        assert future.wait() == number
        others = [rpc.rpc_async("alice", targets.nap, args=(0.1, each)) for each in range(3)]
        assert [other.wait() for other in others] == [0, 1, 2]
    assert rpc.rpc_sync("alice", targets.add, args=(1, 2)) == 3
