"""Backward passes over real workers: contexts, gradients, errors, and leaks."""

import gc
import os
import threading

import pytest
import targets
import torch
from conftest import eventually
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from interrupting import interrupted

import rayrpc as rpc
from rayrpc import autograd
from rayrpc._autograd import accumulate, hook, part_calls, participant, whole_run
from rayrpc._concurrency import waiting


def contexts_at(*names):
    infos = [rpc.rpc_sync(name, autograd._get_debug_info) for name in names]
    return [int(info["num_autograd_contexts"]) for info in infos]


@pytest.fixture(autouse=True)
def nothing_left(request):
    """Every test ends without a context or a pass anywhere."""
    yield
    if "workers" in request.fixturenames:
        names = [*request.getfixturevalue("workers"), "driver"]
        assert eventually(lambda: contexts_at(*names) == [0] * len(names)), contexts_at(*names)
        info = autograd._get_debug_info()
        assert info["num_current_backward_passes"] == "0"


def passes_at(name):
    return rpc.rpc_sync(name, autograd._get_debug_info)["num_current_backward_passes"]


def relay(x, w, to):
    return rpc.rpc_sync(to, targets.step, args=(x, w)) + x


def check(gradients, loss, *leaves):
    expected = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert {leaf for leaf, e in zip(leaves, expected, strict=True) if e is not None} == set(
        gradients
    )
    for leaf, each in zip(leaves, expected, strict=True):
        if each is not None:
            torch.testing.assert_close(gradients[leaf], each)
            assert leaf.grad is None


class TestGradients:
    def test_a_sparse_leaf_gets_a_gradient(self, workers):
        x = torch.rand(3, 3).to_sparse().requires_grad_()
        with autograd.context() as context_id:
            y = rpc.rpc_sync("alice", torch.mul, args=(x, 3.0))
            y = rpc.rpc_sync("bob", torch.mul, args=(y, 1.0))
            autograd.backward(context_id, [torch.sparse.sum(y)])
            gradient = autograd.get_gradients(context_id)[x]
        torch.testing.assert_close(gradient.to_dense(), torch.full((3, 3), 3.0))

    def test_flow_through_calls_of_every_kind(self, workers, leaves):
        x, w = leaves
        with autograd.context() as context_id:
            one = rpc.rpc_sync("alice", targets.step, args=(x, w))
            two = rpc.rpc_async("bob", relay, args=(one, w, "alice")).wait()
            three = rpc.remote("alice", torch.mul, args=(two, x)).to_here()
            autograd.backward(context_id, [three.sum()])
            one = targets.step(x, w)
            check(
                autograd.get_gradients(context_id), ((targets.step(one, w) + one) * x).sum(), x, w
            )

    def test_of_arguments_in_containers_and_keywords(self, workers, leaves):
        x, w = leaves
        with autograd.context() as context_id:
            total = rpc.rpc_sync("alice", add_up, args=([x, {"w": w}],), kwargs={"more": (x,)})
            autograd.backward(context_id, [total])
            check(autograd.get_gradients(context_id), (x + w * 2 + x).sum(), x, w)

    def test_stay_where_the_parameters_are(self, workers):
        rref = rpc.remote("alice", torch.nn.Linear, args=(3, 1))
        with autograd.context() as context_id:
            out = rpc.rpc_sync("bob", forward_at, args=(rref, torch.ones(2, 3)))
            autograd.backward(context_id, [out.sum()])
            assert autograd.get_gradients(context_id) == {}
            weight, bias, own = rpc.rpc_sync("alice", gradients_of, args=(context_id, rref))
        torch.testing.assert_close(weight, torch.full((1, 3), 2.0))
        torch.testing.assert_close(bias, torch.full((1,), 2.0))
        assert own == [None, None]

    def test_of_several_roots_and_passes_add_up(self, workers, leaves):
        x, w = leaves
        with autograd.context() as context_id:
            y = rpc.rpc_sync("alice", targets.step, args=(x, w))
            autograd.backward(context_id, [y.sum(), (y * y).sum()], retain_graph=True)
            autograd.backward(context_id, [y.sum()])
            local = targets.step(x, w)
            check(
                autograd.get_gradients(context_id),
                2 * local.sum() + (local * local).sum(),
                x,
                w,
            )

    def test_messages_that_were_not_used_are_not_waited_for(self, workers, leaves):
        """Torch's own pass would wait for ever here."""
        x, w = leaves
        with autograd.context() as context_id:
            rpc.rpc_sync("alice", targets.step, args=(x, w))
            kept = [rpc.rpc_sync(name, targets.step, args=(x, w)) for name in ("alice", "bob")]
            autograd.backward(context_id, [kept[0].sum()])
            check(autograd.get_gradients(context_id), targets.step(x, w).sum(), x, w)

    def test_a_pass_reaches_a_worker_as_often_as_the_graph_does(self, workers, leaves):
        x, w = leaves
        rounds = 12
        with autograd.context() as context_id:
            y = x
            for number in range(rounds):
                y = rpc.rpc_sync(("alice", "bob")[number % 2], targets.step, args=(y, w)) + x
            autograd.backward(context_id, [y.sum()])
            local = x
            for _ in range(rounds):
                local = targets.step(local, w) + x
            check(autograd.get_gradients(context_id), local.sum(), x, w)

    def test_hooks_of_tensors_get_them(self, workers, leaves):
        x, w = leaves
        x.register_hook(lambda gradient: gradient * 2)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("alice", targets.step, args=(x * 1, w))
            seen = []
            y.register_hook(seen.append)
            autograd.backward(context_id, [(y + x).sum()])
            check(autograd.get_gradients(context_id), (targets.step(x * 1, w) + x).sum(), x, w)
        torch.testing.assert_close(seen[0], torch.ones(3, 3))

    def test_parameters_are_recorded_as_torch_does_it(self, workers):
        """A call of an operator extends their graph; a user's function gets a leaf."""
        parameter = torch.nn.Parameter(torch.rand(3))
        with autograd.context() as context_id:
            out = rpc.rpc_sync("alice", torch.mul, args=(parameter, torch.ones(3)))
            autograd.backward(context_id, [out.sum()])
            assert set(autograd.get_gradients(context_id)) == {parameter}
            kind, is_leaf = rpc.rpc_sync("alice", describe, args=(parameter,))
            assert kind == "Parameter" and is_leaf
            kind, is_leaf = rpc.rpc_sync("alice", describe, args=(parameter * 1,))
            assert kind == "Tensor" and not is_leaf

    @pytest.mark.usefixtures("quick_switches")
    def test_many_passes_end_whatever_runs_next(self, workers, leaves):
        """Replies come while the leader waits for others, and it may be the one to process them."""
        x, w = leaves
        for number in range(150):
            first, second = ("alice", "bob") if number % 2 else ("bob", "alice")
            with autograd.context() as context_id:
                one = rpc.rpc_async(first, relay, args=(x, w, second))
                two = rpc.rpc_async(second, relay, args=(x, w, "driver"))
                three = rpc.rpc_sync(first, targets.step, args=(one.wait() + two.wait(), w))
                autograd.backward(context_id, [(three + two.wait()).sum()])
                found = autograd.get_gradients(context_id)
        one = two = targets.step(x, w) + x
        check(found, (targets.step(one + two, w) + two).sum(), x, w)

    def test_an_rref_runs_the_pass_at_its_owner(self, workers, leaves):
        x, w = leaves
        with autograd.context() as context_id:
            loss = rpc.remote("alice", loss_of, args=(x, w))
            loss.backward(context_id)
            check(autograd.get_gradients(context_id), targets.step(x, w).sum(), x, w)


def add_up(items, more):
    return (items[0] + items[1]["w"] * 2 + more[0]).sum()


def forward_at(rref, x):
    return rpc.rpc_sync(rref.owner(), forward_of, args=(rref, x))


def forward_of(rref, x):
    return rref.local_value()(x)


def gradients_of(context_id, rref):
    gradients = autograd.get_gradients(context_id)
    parameters = list(rref.local_value().parameters())
    return *[gradients[p] for p in parameters], [p.grad for p in parameters]


def describe(tensor):
    return type(tensor).__name__, tensor.is_leaf


def not_here():
    raise ValueError("not here")


class Unreadable:
    def __reduce__(self):
        return not_here, ()


def loss_of(x, w):
    return targets.step(x, w).sum()


# -- random programs ----------------------------------------------------------------------------

OPERATIONS = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "matmul": lambda a, b: torch.tanh(a @ b),
    "both": lambda a, b: (torch.sin(a), a - b),
    "first": lambda a, b: a.clone(),
}


def operate(name, a, b):
    return OPERATIONS[name](a, b)


def operate_at(to, name, a, b):
    return rpc.rpc_sync(to, operate, args=(name, a, b))


WHERE = ["here", "alice", "bob", "driver", "alice by bob", "driver by alice"]
PROGRAMS = st.lists(
    st.tuples(
        st.sampled_from(sorted(OPERATIONS)),
        st.integers(0, 99),
        st.integers(0, 99),
        st.sampled_from(WHERE),
    ),
    min_size=1,
    max_size=14,
)


def run_program(program, leaves, is_local):
    values = list(leaves)
    for name, a, b, where in program:
        operands = values[a % len(values)], values[b % len(values)]
        to, _, by = where.partition(" by ")
        if is_local or to == "here":
            made = operate(name, *operands)
        elif by:
            made = rpc.rpc_sync(by, operate_at, args=(to, name, *operands))
        else:
            made = rpc.rpc_sync(to, operate, args=(name, *operands))
        values += made if isinstance(made, tuple) else [made]
    return (values[-1] + values[len(values) // 2]).sum()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(  # alice must begin before her first gradients from the leader: bob sends her his first
    program=[
        ("multiply", 77, 93, "here"),
        ("matmul", 94, 65, "alice"),
        ("multiply", 99, 71, "alice"),
        ("matmul", 7, 61, "bob"),
        ("multiply", 70, 25, "alice by bob"),
    ],
    passes=1,
)
@given(program=PROGRAMS, passes=st.integers(1, 2))
def test_any_program_has_the_gradients_that_it_has_in_one_process(workers, program, passes):
    torch.manual_seed(len(program))
    leaves = [torch.rand(3, 3, requires_grad=True) for _ in range(3)]
    with autograd.context() as context_id:
        loss = run_program(program, leaves, is_local=False)
        for number in range(passes):
            autograd.backward(context_id, [loss], retain_graph=number + 1 < passes)
        gradients = autograd.get_gradients(context_id)
    local = run_program(program, leaves, is_local=True)
    torch.testing.assert_close(loss.detach(), local.detach())
    check(gradients, passes * local, *leaves)


# -- contexts -----------------------------------------------------------------------------------


def test_profiles_have_the_pass(workers):
    w = torch.rand(3, 3, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("alice", targets.step, args=(w, w))
        with torch.profiler.profile() as recorded:
            autograd.backward(context_id, [y.sum()])
    names = [event.name for event in recorded.events()]
    assert names.count("torch::distributed::autograd::backward") == 1


def relay_back(x, w):
    return rpc.rpc_sync("driver", targets.step, args=(x, w)) * w


def test_an_interrupt_of_a_pass_at_any_point_spoils_no_later_one(workers):
    w = torch.rand(3, 3, requires_grad=True)
    w.grad = torch.ones(3, 3)
    w.register_hook(lambda gradient: gradient * 2)
    found: list[torch.Tensor] = []

    def step():
        found.clear()
        with autograd.context() as context_id:
            y = rpc.rpc_sync("alice", relay_back, args=(w * 3, w))
            autograd.backward(context_id, [y.sum()])
            found.append(autograd.get_gradients(context_id)[w])

    step()
    expected = found[0]
    files = [whole_run.__file__, accumulate.__file__, waiting.__file__]
    number = 1
    while interrupted(step, files, number):
        assert w.grad is not None and w.grad.eq(1).all(), f"after an interrupt at point {number}"
        step()
        assert torch.allclose(found[0], expected), f"after an interrupt at point {number}"
        number += 1
    assert number > 20


class TestContexts:
    def test_belong_to_threads_and_travel_with_calls(self, workers):
        with autograd.context() as context_id:
            assert rpc.rpc_sync("alice", context_here) == context_id
            assert rpc.rpc_sync("alice", targets.call_on, args=("bob", context_here)) == context_id
            seen = []
            thread = threading.Thread(target=lambda: seen.append(context_here()))
            thread.start()
            thread.join()
            assert seen == [None]
        assert rpc.rpc_sync("alice", context_here) is None

    def test_travel_with_callbacks(self, workers):
        with autograd.context() as context_id:
            future = rpc.rpc_async("alice", targets.nap, args=(0.1, 1))
            seen = future.then(lambda done: (done.value(), context_here()))
            again = seen.then(lambda done: (*done.value(), context_here()))
            assert again.wait() == (1, context_id, context_id)
            failed = future.then(lambda done: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                failed.wait()

    def test_one_in_another_is_refused(self, workers):
        with (
            autograd.context(),
            pytest.raises(RuntimeError, match="Already have an autograd context id"),
            autograd.context(),
        ):
            pass

    def test_end_also_at_workers_that_are_first_called_after_their_end(self, workers, leaves):
        with autograd.context():
            slow = rpc.rpc_async("bob", targets.nap, args=(0.5,))
            late = slow.then(lambda _: rpc.rpc_sync("alice", targets.step, args=leaves))
        late.wait()

    def test_end_also_where_the_call_with_their_release_cannot_be_decoded(self, workers, leaves):
        x, w = leaves
        with autograd.context():
            rpc.rpc_sync("alice", targets.step, args=(x, w))
        with autograd.context(), pytest.raises(ValueError, match="not here"):
            rpc.rpc_sync("alice", targets.step, args=(Unreadable(), w))

    def test_two_at_a_time_keep_apart(self, workers, leaves):
        x, w = leaves
        results = []

        def train(factor):
            with autograd.context() as context_id:
                for _ in range(5):
                    y = rpc.rpc_sync("alice", targets.step, args=(x * factor, w))
                    autograd.backward(context_id, [y.sum()])
                results.append((factor, autograd.get_gradients(context_id)))

        threads = [threading.Thread(target=train, args=(f,)) for f in (1.0, 2.0, 3.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 3
        for factor, gradients in results:
            check(gradients, 5 * targets.step(x * factor, w).sum(), x, w)

    def test_a_tensor_of_another_context_is_refused(self, workers, leaves):
        x, w = leaves
        with autograd.context():
            old = rpc.rpc_sync("alice", targets.step, args=(x, w))
        with autograd.context() as context_id:
            y = rpc.rpc_sync("alice", targets.step, args=(old, w))
            with pytest.raises(RuntimeError, match="Autograd context no longer valid"):
                autograd.backward(context_id, [y.sum()])

    def test_many_leave_nothing_behind(self, workers, leaves):
        x, w = leaves
        rpc.rpc_sync("alice", targets.objects)
        with autograd.context():
            rpc.rpc_sync("alice", relay, args=(x, w, "bob"))
        gc.collect()
        before = rpc.rpc_sync("bob", targets.objects)
        for number in range(200):
            with autograd.context() as context_id:
                y = rpc.rpc_sync("alice", relay, args=(x, w, "bob"))
                if number % 2:
                    autograd.backward(context_id, [y.sum()])
        assert eventually(lambda: contexts_at("alice", "bob") == [0, 0])
        assert rpc.rpc_sync("bob", targets.objects) < before + 500

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    @pytest.mark.skipif(os.environ.get("TEST_SCALE") != "1", reason="set TEST_SCALE=1")
    def test_ten_thousand_over_four_workers_leave_nothing_behind(self, workers, leaves):
        rpc.start_workers(["carol", "dave"])
        names = ["alice", "bob", "carol", "dave"]
        x, w = leaves
        before: list[int] = []
        for number in range(10_000):
            with autograd.context() as context_id:
                here, there = names[number % 4], names[(number + 1) % 4]
                y = rpc.rpc_sync(here, relay, args=(x, w, there))
                if number % 10 == 0:
                    autograd.backward(context_id, [y.sum()])
            if number == 200:
                assert eventually(lambda: contexts_at(*names) == [0] * 4)
                before = [rpc.rpc_sync(name, targets.objects) for name in names]
        assert eventually(lambda: contexts_at(*names) == [0] * 4)
        after = [rpc.rpc_sync(name, targets.objects) for name in names]
        assert all(a < b + 500 for a, b in zip(after, before, strict=True)), (before, after)


def context_here():
    try:
        return autograd._current_context()._context_id()
    except RuntimeError:
        return None


# -- errors -------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if targets.shared.get("fail", True):
            raise ValueError("as expected")
        return gradient


def fail_later(x):
    return Fails.apply(x * 2)


def begin_after_the_end(context_id):
    context = hook.contexts_of().find_context(context_id)
    part_calls.abort_part(context_id, 99, rpc.errors.RpcError("failed elsewhere"))
    part = participant.begin_part(
        context_id, 99, {number: [0] for number in context.messages.sent()}, False, 0, {}
    )
    with pytest.raises(RuntimeError, match="failed elsewhere"):
        part.wait()
    return len(context.passes)


class TestErrors:
    def test_of_a_remote_backward_name_the_worker_and_end_the_pass(self, workers, leaves):
        x, w = leaves
        bob = rpc.get_worker_info("bob").id
        with autograd.context() as context_id:
            y = rpc.rpc_sync("alice", targets.call_on, args=("bob", fail_later, x))
            y = rpc.rpc_sync("alice", targets.step, args=(y, w))
            for _ in range(3):
                with pytest.raises(RuntimeError, match=f"Error on Node {bob}: as expected"):
                    autograd.backward(context_id, [y.sum()], retain_graph=True)
            rpc.rpc_sync("bob", targets.keep, args=("fail", False))
            autograd.backward(context_id, [y.sum()], retain_graph=True)
            rpc.rpc_sync("bob", targets.drop, args=("fail",))
            assert set(autograd.get_gradients(context_id)) == {x, w}
        # the leader has the other parts aborted, and does not wait for them
        assert eventually(lambda: [passes_at(name) for name in workers] == ["0", "0"])

    def test_end_parts_that_have_yet_to_begin(self, workers, leaves):
        with autograd.context() as context_id:
            rpc.rpc_sync("bob", targets.step, args=leaves)
            assert rpc.rpc_sync("bob", begin_after_the_end, args=(context_id,)) == 0

    def test_of_arguments_are_torchs(self, workers):
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 100"):
            autograd.backward(100, [torch.rand(1, requires_grad=True).sum()])
        with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
            autograd._current_context()
        with autograd.context() as context_id:
            with pytest.raises(TypeError, match="incompatible function arguments"):
                autograd.backward(context_id, None)  # type: ignore[arg-type]
            with pytest.raises(RuntimeError, match="No tensors provided"):
                autograd.backward(context_id, [])
            with pytest.raises(RuntimeError, match="requires_grad not set on root"):
                autograd.backward(context_id, [torch.rand(3)])
            with pytest.raises(RuntimeError, match="all roots need to be scalar"):
                autograd.backward(context_id, [torch.rand(3, requires_grad=True) * 2])
            with pytest.raises(RuntimeError, match="valid gradient function"):
                autograd.backward(context_id, [torch.rand(1, requires_grad=True)])
