"""Random programs over several workers beside the same in one process, with all that torch does.

Compared are gradients, how often Functions, hooks and checkpoints run, and whether the graph is
freed: by the program on workers, in a context, and by the same program without calls.
"""

from __future__ import annotations

import collections
import os
import threading
from typing import Any

import pytest
import torch
from graph_parts import accumulate_node
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import rayrpc as rpc
from rayrpc import autograd

EXAMPLES = int(os.environ.get("TEST_PROGRAMS", "40"))
WAIT_SECONDS = 60.0

counts: collections.Counter[str] = collections.Counter()  # of this process
_lock = threading.Lock()


def count(what):
    with _lock:
        counts[what] += 1


def take_counts():
    with _lock:
        taken = dict(counts)
        counts.clear()
    return taken


class Clip(torch.autograd.Function):
    """Not linear: parts of a gradient, clipped one by one, add up to another one."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        count("Clip")
        return gradient.clamp(-0.7, 0.7)


class Pick(torch.autograd.Function):
    """Two inputs and two outputs; what is not used is zero."""

    @staticmethod
    def forward(ctx, x, y):
        return x + 0.5 * y, x - y

    @staticmethod
    def backward(ctx, one, other):
        count("Pick")
        return torch.tanh(one) + other, 0.5 * one - torch.tanh(other)


def block(a, b):
    count("block")
    return torch.sin(a * b) + a


def with_hooks(a, b):
    made = a * b + a
    made.register_hook(lambda gradient: (count("tensor hook"), gradient.clamp(-0.9, 0.9))[1])
    made.grad_fn.register_hook(lambda *_: count("node hook"))
    made.grad_fn.register_prehook(lambda gradients: count("node prehook"))
    return made


def hook_result(made):
    """Hook what a call has returned, which another worker may have sent."""
    made.register_hook(lambda gradient: (count("result's hook"), gradient.clamp(-0.8, 0.8))[1])
    node: Any = made.grad_fn
    node.register_hook(lambda *_: count("result's node hook"))
    node.register_prehook(lambda gradients: count("result's node prehook"))


OPERATIONS = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "clip": lambda a, b: Clip.apply(a) + b,
    "clip a sum": lambda a, b: Clip.apply(a + b),
    "pick": Pick.apply,
    "pick one": lambda a, b: Pick.apply(a, b)[1],
    "checkpoint": lambda a, b: checkpoint(block, a, b, use_reentrant=False),
    "hooks": with_hooks,
    "hooked result": lambda a, b: a * 0.5 + b,
    "first": lambda a, b: a.clone(),
}


def operate(name, a, b):
    return OPERATIONS[name](a, b.to(a.device))


def operate_at(to, name, a, b):
    return rpc.rpc_sync(to, operate, args=(name, a, b))


def twice_at(to, name, a, b):
    """Call another worker with what this one makes, and use both results."""
    made = a * b.to(a.device) + a
    theirs = rpc.rpc_sync(to, operate, args=(name, made, b))
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    return made * theirs


def twice(name, a, b):
    made = a * b.to(a.device) + a
    theirs = operate(name, made, b)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    return made * theirs


WHERE = ["here", "here", "alice", "bob", "driver", "alice by bob", "driver by alice", "bob twice"]
STEP = st.tuples(
    st.sampled_from(sorted(OPERATIONS)),
    st.integers(0, 99),
    st.integers(0, 99),
    st.sampled_from(WHERE),
)
PROGRAMS = st.lists(STEP, min_size=1, max_size=12)
LEAF_HOOKS = st.sets(
    st.sampled_from(["tensor hook", "node hook", "node prehook", "accumulated", "many"])
)


def run_program(program, leaves, is_local):
    values: list[Any] = list(leaves)
    for name, a, b, where in program:
        operands = values[a % len(values)], values[b % len(values)]
        to, _, by = where.partition(" by ")
        is_twice = where.endswith(" twice")
        if is_twice and is_local:
            made = twice(name, *operands)
        elif is_twice:
            made = rpc.rpc_sync("alice", twice_at, args=("bob", name, *operands))
        elif is_local or to == "here":
            made = operate(name, *operands)
        elif by:
            made = rpc.rpc_sync(by, operate_at, args=(to, name, *operands))
        else:
            made = rpc.rpc_sync(to, operate, args=(name, *operands))
        if name == "hooked result":
            hook_result(made)
        values += made if isinstance(made, tuple) else [made]
    device = values[-1].device
    return (values[-1] + values[len(values) // 2].to(device) * values[-2].to(device)).sum()


def make_leaves(seed, hooks, devices=("cpu",) * 3):
    torch.manual_seed(seed)
    made = [torch.randn(2, 2, dtype=torch.float64) for _ in devices]
    leaves = [each.to(to).requires_grad_() for each, to in zip(made, devices, strict=True)]
    one = leaves[0]
    node: Any = accumulate_node(one)
    if "tensor hook" in hooks:
        one.register_hook(lambda g: (count("leaf's hook"), g.clamp(-1, 1))[1])
    if "node hook" in hooks:
        node.register_hook(lambda *_: count("leaf's node hook"))
    if "node prehook" in hooks:
        node.register_prehook(lambda *_: count("leaf's node prehook"))
    if "accumulated" in hooks:
        one.register_post_accumulate_grad_hook(lambda leaf: count("leaf's last hook"))
    if "many" in hooks:
        torch.autograd.graph.register_multi_grad_hook(
            leaves, lambda gradients: count(f"hook of {sum(g is not None for g in gradients)}")
        )
    return leaves, node  # the node keeps its hooks while it lives


def is_freed(run):
    try:
        run()
    except RuntimeError as exc:
        assert "second time" in str(exc), exc
        return True
    return False


def run_locally(program, leaves, passes, contexts=1):
    take_counts()
    for _ in range(contexts):
        loss = run_program(program, leaves, is_local=True)
        for number in range(passes):
            loss.backward(retain_graph=number + 1 < passes)
    taken = take_counts()
    gradients = [None if leaf.grad is None else leaf.grad / contexts for leaf in leaves]
    freed = is_freed(loss.backward)
    take_counts()
    return gradients, taken, freed


def run_on_workers(program, leaves, passes):
    with autograd.context() as context_id:
        loss = run_program(program, leaves, is_local=False)
        for number in range(passes):
            autograd.backward(context_id, [loss], retain_graph=number + 1 < passes)
        gradients = autograd.get_gradients(context_id)
        taken = all_counts()
        freed = is_freed(lambda: autograd.backward(context_id, [loss]))
    return gradients, taken, freed


def all_counts():
    total: collections.Counter[str] = collections.Counter(take_counts())
    for name in ("alice", "bob"):
        total.update(rpc.rpc_sync(name, take_counts))
    return dict(total)


def check(gradients, leaves, expected):
    for leaf, each in zip(leaves, expected, strict=True):
        found = gradients.get(leaf)
        assert (found is None) == (each is None)
        if each is not None:
            torch.testing.assert_close(found, each)
        assert leaf.grad is None


def compare(program, hooks, passes, devices=("cpu",) * 3):
    """Check that a program does on workers what it does in this process."""
    seed = len(program)
    all_counts()
    leaves, node = make_leaves(seed, hooks, devices)
    expected, expected_counts, expected_freed = run_locally(program, leaves, passes)
    del node
    leaves, node = make_leaves(seed, hooks, devices)
    gradients, taken, freed = run_on_workers(program, leaves, passes)
    assert taken == expected_counts
    check(gradients, leaves, expected)
    assert freed == expected_freed
    del node


RESIDUAL = [  # what the first two workers make is used here before and after
    ("clip", 0, 1, "here"),
    ("multiply", 3, 3, "alice"),
    ("add", 4, 3, "here"),
    ("multiply", 5, 0, "bob"),
    ("add", 6, 3, "here"),
]


@pytest.mark.timeout(300 + 9 * EXAMPLES)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(program=RESIDUAL, hooks=set(), passes=1)
@example(program=RESIDUAL, hooks={"tensor hook", "accumulated", "many"}, passes=2)
@given(program=PROGRAMS, hooks=LEAF_HOOKS, passes=st.integers(1, 2))
def test_any_program_does_what_it_does_in_one_process(workers, program, hooks, passes):
    compare(program, hooks, passes)


@pytest.mark.timeout(300 + 9 * EXAMPLES)
@settings(
    max_examples=EXAMPLES // 4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(program=RESIDUAL, hooks={"tensor hook", "node hook"})
@given(program=PROGRAMS, hooks=LEAF_HOOKS)
def test_contexts_at_once_do_not_see_one_another(workers, program, hooks):
    seed, threads = len(program), 4
    all_counts()
    leaves, node = make_leaves(seed, hooks)
    expected, expected_counts, _ = run_locally(program, leaves, 1, threads)
    del node
    leaves, node = make_leaves(seed, hooks)
    results: list[Any] = []

    def run():
        with autograd.context() as context_id:
            loss = run_program(program, leaves, is_local=False)
            autograd.backward(context_id, [loss])
            results.append(autograd.get_gradients(context_id))

    started = [threading.Thread(target=run) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(WAIT_SECONDS)
    assert len(results) == threads
    assert all_counts() == expected_counts
    for gradients in results:
        check(gradients, leaves, expected)
    del node
