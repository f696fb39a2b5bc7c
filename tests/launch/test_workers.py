"""``start_workers``: workers that serve a notebook or a script."""

import contextlib
from pathlib import Path

import pytest
import ray
import targets
from conftest import eventually
from launching import alive

import rayrpc as rpc
from rayrpc import config, errors

pytestmark = pytest.mark.usefixtures("ray_cluster")


def title(pid):
    """Return what ``ps`` shows of a process."""
    with contextlib.suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")
    return ""


def reservations():
    states = [group["state"] for group in ray.util.placement_group_table().values()]
    return [state for state in states if state != "REMOVED"]


def test_workers_serve_until_they_are_stopped(capfd):
    group = rpc.start_workers(["carol"], me="me")
    try:
        assert [info.name for info in group] == ["carol"] and len(group) == 1
        assert rpc.rpc_sync("carol", targets.whoami) == "carol"
        assert group["carol"] == rpc.get_worker_info("carol")
        rpc.rpc_sync("carol", targets.say, args=("hello",))
        seen = ["", ""]

        def printed():
            for i, text in enumerate(capfd.readouterr()):
                seen[i] += text
            return "(carol) hello\n" in seen[0] and "(carol) hello-err\n" in seen[1]

        assert eventually(printed), seen
        worker = rpc.rpc_sync("carol", targets.pid)
        assert eventually(lambda: title(worker) == "ray::carol"), title(worker)
        titles = {title(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
        assert any(each.startswith("ray::me") for each in titles), titles
        group.stop()
        assert eventually(lambda: not alive(worker))
        with pytest.raises(errors.WorkerDiedError, match="carol"):
            rpc.rpc_sync("carol", targets.whoami)
        again = rpc.start_workers(["carol"])  # the name is free
        assert rpc.rpc_sync("carol", targets.whoami) == "carol"
        worker = rpc.rpc_sync("carol", targets.pid)
        assert len(again) == 1
    finally:
        rpc.shutdown()
    assert eventually(lambda: not alive(worker))  # shutdown ends them, too


def test_what_a_placement_strategy_reserved_is_given_back():
    before = rpc.settings()
    rpc.configure(placement_strategy="PACK")
    try:
        group = rpc.start_workers(["erin"], me="me")
        assert reservations() == ["CREATED"]
        group.stop()
        assert eventually(lambda: reservations() == [])
    finally:
        config.use(before)
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown()


def test_resources_that_no_node_has_are_refused_by_name():
    for resources, name in (
        ({"num_gpus": 1}, "GPU"),
        ({"num_cpus": 1000}, "CPU"),
        ({"resources": {"unobtainium": 1}}, "unobtainium"),
    ):
        with pytest.raises(errors.PlacementError, match=f"'dora' asks for {name}"):
            rpc.start_workers(["dora"], resources=resources)
    assert not rpc._is_current_rpc_agent_set()


def test_a_static_group_takes_no_workers():
    options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://localhost:29680")
    rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
    try:
        with pytest.raises(errors.GroupError, match="dynamic group"):
            rpc.start_workers(["dora"])
    finally:
        rpc.shutdown()


def test_names_must_be_a_list():
    with pytest.raises(TypeError, match="must be a list"):
        rpc.start_workers("dora")


@pytest.fixture
def shut_down():
    yield
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown()


def pids(*names):
    return [rpc.rpc_sync(name, targets.pid) for name in names]


@pytest.mark.usefixtures("shut_down")
def test_workers_that_are_asked_for_again_are_those_that_are_there():
    def note():
        pass

    group = rpc.start_workers(["carol", "dave"], me="me", on_start=note)
    before = pids("carol", "dave")
    assert rpc.start_workers(["dave", "carol"], on_start=lambda: None) is group
    assert rpc.get_group().start_workers(["carol", "dave"]) is group
    assert pids("carol", "dave") == before
    for names, given, advice in (
        (["carol"], {}, "ask for all workers that were started together"),
        (["carol"], {"restart": True}, "ask for all workers that were started together"),
        (["carol", "dave", "erin"], {}, "ask for those alone, or for all anew by restart=True"),
        (["carol", "dave"], {"resources": {"num_cpus": 1}}, "they have other resources"),
        (["carol", "dave"], {"max_restarts": 1}, "or another lifetime; restart=True"),
        (["erin", "me"], {}, "choose other names"),
        (["erin", "me"], {"restart": True}, "choose other names"),
    ):
        with pytest.raises(errors.GroupError, match=advice):
            rpc.start_workers(names, **given)
    assert pids("carol", "dave") == before

    anew = rpc.start_workers(["carol", "dave", "erin"], restart=True)
    assert anew is not group and len(group) == 0
    assert not any(alive(pid) for pid in before)
    assert not set(pids("carol", "dave", "erin")) & set(before)


@pytest.mark.usefixtures("shut_down")
def test_workers_that_have_died_are_asked_for_anew():
    group = rpc.start_workers(["carol"], me="me")
    for _ in range(2):
        rpc.rpc_async("carol", targets.kill_me)
        assert eventually(lambda: len(rpc.get_group().workers()) == 1)
        before, group = group, rpc.start_workers(["carol"])
        assert group is not before
    assert rpc.start_workers(["carol"]) is group

    pair = rpc.start_workers(["dave", "erin"])
    rpc.rpc_async("dave", targets.kill_me)
    assert eventually(lambda: len(rpc.get_group().workers()) == 3)
    with pytest.raises(errors.GroupError, match="the others have died; restart=True"):
        rpc.start_workers(["dave", "erin"])
    assert rpc.start_workers(["dave", "erin"], restart=True) is not pair


def test_names_that_cannot_be_are_refused_before_any_worker_starts(monkeypatch):
    monkeypatch.delattr("rayrpc.launch.workers.placed_options")
    with pytest.raises(errors.GroupError, match="'a' is there twice"):
        rpc.start_workers(["a", "b", "a"])
    with pytest.raises(errors.GroupError, match="'me' is this process's: give it another"):
        rpc.start_workers(["a", "me"], me="me")
    assert not rpc._is_current_rpc_agent_set()
