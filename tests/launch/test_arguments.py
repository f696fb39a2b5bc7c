"""What ranks are called with: what they share with the process that starts them, and what not."""

import multiprocessing
import pickle
from multiprocessing import resource_sharer

import pytest
import torch

from rayrpc.errors import PlacementError
from rayrpc.launch.arguments import Arguments

HERE, THERE = "node-1", "node-2"


def main(rank, *args):
    pass


def only(obj, nodes, here=HERE):
    """Return an argument as each rank has it."""
    return [target.load()[1][0] for target in Arguments(main, (obj,)).targets(nodes, here)]


@pytest.fixture
def sharer():
    """Ends the thread of multiprocessing that hands out descriptors."""
    yield
    resource_sharer.stop(timeout=60)


def shared_tensor():
    return torch.zeros(3).share_memory_()


def shared_module():
    return torch.nn.Linear(2, 2).share_memory()


class TestWhatIsFound:
    @pytest.mark.parametrize("obj", [1, "text", [main], {"a": (1, 2.0)}, torch.float32])
    def test_plain_values_are_not_shared(self, obj):
        arguments = Arguments(main, (obj,))
        assert not arguments.can_share and not arguments.tied

    @pytest.mark.parametrize(
        "obj",
        [
            torch.zeros(3),
            {"deep": [torch.zeros(3)]},
            torch.nn.Linear(2, 2),
            torch.zeros(3).untyped_storage(),
            torch.eye(3).to_sparse(),
        ],
        ids=lambda obj: type(obj).__name__,
    )
    def test_tensors_can_be_shared_and_are_tied_to_no_node(self, obj):
        arguments = Arguments(main, (obj,))
        assert arguments.can_share and not arguments.tied

    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (shared_tensor, "a Tensor in shared memory"),
            (shared_module, "a Parameter in shared memory"),
            (lambda: [shared_tensor().untyped_storage()], "a UntypedStorage in shared memory"),
        ],
    )
    def test_shared_memory_is_tied_to_this_node(self, make, name):
        assert Arguments(main, (make(),)).tied == name

    def test_pipes_are_tied_to_this_node(self):
        ends = multiprocessing.Pipe()
        assert Arguments(main, (ends[0],)).tied == "a Connection"
        for end in ends:
            end.close()

    def test_what_the_main_holds_counts(self):
        tensor = shared_tensor()
        assert Arguments(lambda rank: tensor, ()).tied
        assert Arguments(tensor.add, (), by_value=True).tied

    def test_looking_shares_nothing(self):
        tensor = torch.zeros(3)
        Arguments(main, (tensor,))
        assert not tensor.is_shared()

    def test_what_only_children_can_inherit_is_refused(self):
        for by_value in (False, True):
            lock = multiprocessing.get_context("spawn").Lock()
            with pytest.raises(RuntimeError, match="through inheritance"):
                Arguments(main, (lock,), by_value)


class TestOtherNodes:
    def test_tensors_are_copied_with_a_warning(self, caplog):
        tensor = torch.ones(3)
        copies = only(tensor, [THERE] * 3)
        for copy in copies:
            copy += 1
        assert all(copy.tolist() == [2, 2, 2] for copy in copies) and tensor.tolist() == [1, 1, 1]
        assert len(caplog.records) == 1 and "3 of 3 ranks run on other nodes" in caplog.text

    def test_plain_values_need_no_warning(self, caplog):
        assert only("text", [THERE, THERE]) == ["text", "text"]
        assert not caplog.records

    @pytest.mark.parametrize(
        ("nodes", "here", "rank"), [([HERE, THERE], HERE, 1), ([HERE, THERE], "", 0)]
    )
    def test_shared_memory_is_refused(self, nodes, here, rank):
        arguments = Arguments(main, (shared_tensor(),))
        with pytest.raises(PlacementError, match=f"Rank {rank} cannot .*in shared memory"):
            arguments.targets(nodes, here)

    def test_a_main_pickles_by_reference_where_it_can(self):
        for arguments, by_value in (
            (Arguments(main, ()), False),
            (Arguments(lambda rank: rank, ()), True),
            (Arguments(lambda rank: rank, (), by_value=True), True),
        ):
            (target,) = arguments.targets([THERE], HERE)
            assert (b"cloudpickle" in target.pickled) is by_value
            assert callable(pickle.loads(target.pickled)[0]) and not target.authkey


@pytest.mark.usefixtures("sharer")
class TestThisNode:
    def test_each_rank_shares_what_all_share(self):
        tensor = torch.zeros(3)
        for rank, shared in enumerate(only(tensor, [HERE] * 3)):
            shared[rank] = rank + 1
        assert tensor.is_shared() and tensor.tolist() == [1, 2, 3]

    def test_so_does_a_main_that_goes_by_value(self):
        tensor = torch.zeros(3)
        (target,) = Arguments(lambda rank: tensor.fill_(rank), ()).targets([HERE], HERE)
        target.load()[0](4)
        assert tensor.tolist() == [4, 4, 4]

    def test_ranks_on_both_nodes(self, caplog):
        tensor = torch.zeros(2)
        copy, shared = only(tensor, [THERE, HERE])
        copy += 1
        shared += 2
        assert tensor.tolist() == [2, 2]
        assert "1 of 2 ranks run on other nodes" in caplog.text

    def test_what_torch_refuses_to_share_is_refused(self):
        tensor = torch.ones(2, requires_grad=True) * 2
        with pytest.raises(RuntimeError, match="non-leaf"):
            Arguments(main, (tensor,)).targets([HERE], HERE)

    def test_a_pipe_arrives_open(self):
        near, far = multiprocessing.Pipe()
        (arrived,) = only(far, [HERE])
        far.close()
        arrived.send("text")
        assert near.poll(20) and near.recv() == "text"
        for end in (near, arrived):
            end.close()
