"""The errors: their tree, and the texts that they make."""

import pickle
import re

from rayrpc import errors
from rayrpc.errors import GroupCallError, RpcError, WorkerDiedError


def test_the_tree_at_the_top_has_every_error():
    drawn = re.findall(r"^ *[│ ]*[├└]── (\w+)", errors.__doc__ or "", re.MULTILINE)
    assert sorted([*drawn, "RpcError"]) == sorted(errors.__all__)


def test_every_error_is_an_rpc_error():
    assert all(issubclass(getattr(errors, name), RpcError) for name in errors.__all__)


def test_a_death_names_the_worker_its_node_and_the_cause_in_sentences():
    error = WorkerDiedError("bob", "its process died: connection error code 2.", "10.0.0.5")
    begin, end = "RPC worker 'bob' (on node 10.0.0.5) is gone: ", ". Calls, Futures and RRefs"
    assert str(error).startswith(f"{begin}its process died: connection error code 2{end}")
    assert str(WorkerDiedError("bob")).startswith(
        f"RPC worker 'bob' is gone: it died or was disconnected{end}"
    )


def test_errors_with_attributes_are_sent_with_them():
    for error in (
        WorkerDiedError("bob", "it has ended", "node"),
        GroupCallError("group", {"bob": RpcError("failed")}, {"ann": 1}),
    ):
        sent = pickle.loads(pickle.dumps(error))
        assert type(sent) is type(error) and str(sent) == str(error)
        assert vars(sent).keys() == vars(error).keys()
