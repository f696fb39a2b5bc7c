"""The context of a thread, also after an interrupt anywhere in a callback."""

import pytest
from conftest import keeps_variables
from interrupting import interrupted

from rayrpc._autograd import current_context
from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.current_context import ContextFuture, thread


def test_no_interrupt_of_a_callback_leaves_a_thread_in_the_context_of_its_call():
    context = DistAutogradContext(1, None)
    ran = []

    def complete():
        future = ContextFuture(context)
        future.add_done_callback(lambda _: ran.append(thread.context))
        future.set_result(None)

    number = 1
    while interrupted(complete, {current_context.__file__}, number):
        assert thread.context is None, f"after an interrupt at point {number}"
        number += 1
    assert number > 5 and ran[-1] is context


def test_an_error_of_a_callback_is_its_futures_and_keeps_no_variables():
    future = ContextFuture(DistAutogradContext(1, None))
    after = future.then(lambda done: {}[done.value()])
    future.set_result("key")
    with pytest.raises(KeyError, match="key"):
        after.wait()
    assert not keeps_variables(after.wait)
