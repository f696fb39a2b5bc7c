"""From ``init_rpc``'s arguments to an agent: defaults, refusals and what is closed after them."""

import operator
from typing import Any

import pytest
import torch

from rayrpc import api, backend_registry, startup
from rayrpc._protocol.membership import GUEST, PROCESS, RESTARTS
from rayrpc._runtime import current
from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.objects import NoStore
from rayrpc._transports.memory import MemoryDirectory, MemoryHub, MemoryTransport
from rayrpc.config import Settings
from rayrpc.errors import ArgumentTypeError, GroupError, RpcError
from rayrpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from rayrpc.startup import Role, choose_backend, default_options, make_agent, open_backend

WAIT_SECONDS = 60.0
OURS = backend_registry.BackendType.TENSORPIPE


def in_group(name="there", **options):
    return TensorPipeRpcBackendOptions(init_method=f"ray://{name}", **options)


class Store(NoStore):
    """Stands in for Ray's object store."""

    class type:
        pass


class Transport(MemoryTransport):
    closes = 0

    def close(self):
        self.closes += 1
        super().close()


class Opened:
    """The transports and directories that were opened, on one hub."""

    def __init__(self):
        self.hub = MemoryHub()
        self.keys = []
        self.transports = []
        self.left = 0

    def open(self, settings, key, worker, token):
        opened = self

        class Directory(MemoryDirectory):
            def leave(self):
                opened.left += 1
                super().leave()

        self.keys.append(key)
        self.transports.append(Transport(self.hub, token))
        return self.transports[-1], Directory(self.hub, key)


@pytest.fixture
def opened(monkeypatch):
    """Have agents use transports in memory; note what ends with the agent."""
    opened = Opened()
    monkeypatch.setattr(startup, "open_transport", opened.open)
    monkeypatch.setattr(startup, "open_objects", lambda *_: Store())
    monkeypatch.setattr(startup, "watch_actor", lambda on_exit: lambda: None)
    monkeypatch.setattr(startup, "open_metrics", lambda warns: None)
    return opened


@pytest.fixture
def join(opened):
    """Make agents that serve; they leave their groups at the end."""
    agents = []

    def join(name, rank=-1, world_size=None, options=None, settings=None, **rest):
        settings = settings or Settings(init_timeout=WAIT_SECONDS)
        options = options or in_group()
        agents.append(make_agent(name, rank, world_size, options, settings, api.user_api, **rest))
        agents[-1].start()
        return agents[-1]

    yield join
    for agent in agents:
        agent.shutdown()


class TestBackends:
    def test_the_default_is_ours_with_the_options_of_the_settings(self):
        settings = Settings(num_worker_threads=3, rpc_timeout=7.0)
        backend, options = choose_backend(None, None, settings)
        assert backend is OURS and type(options) is TensorPipeRpcBackendOptions
        assert (options.num_worker_threads, options.rpc_timeout) == (3, 7.0)
        same = default_options(settings)
        assert (same.num_worker_threads, same.rpc_timeout) == (3, 7.0)

    def test_options_are_kept_and_choose_their_backend(self):
        options = in_group(rpc_timeout=1)
        assert choose_backend(None, options, Settings()) == (OURS, options)
        named = backend_registry.BackendType.RAY
        assert choose_backend(named, options, Settings()) == (named, options)

    @pytest.mark.parametrize(
        ("backend", "options", "text"),
        [
            ("TENSORPIPE", None, "Argument backend must be a member of BackendType"),
            (None, {}, "rpc_backend_options must be an instance of RpcBackendOptions"),
            (None, RpcBackendOptions(), "Could not infer backend"),
        ],
    )
    def test_what_is_none_is_a_type_error(self, backend, options, text):
        with pytest.raises(TypeError, match=text):
            choose_backend(backend, options, Settings())

    def test_another_librarys_backend_gets_its_own_options_and_makes_its_agent(self, monkeypatch):
        monkeypatch.setattr(backend_registry, "BackendType", backend_registry.BackendType)
        made = []
        theirs = backend_registry.register_backend(
            "THEIRS",
            lambda rpc_timeout, init_method, **_: RpcBackendOptions(rpc_timeout, init_method),
            lambda **given: made.append(given) or "agent",
        )
        backend, options = choose_backend(theirs, None, Settings(rpc_timeout=7.0))
        assert backend is theirs and type(options) is RpcBackendOptions
        agent = open_backend(theirs, "store", "me", 0, 2, options, Settings(), api.user_api)
        assert agent == "agent"
        assert made == [
            {
                "store": "store",
                "name": "me",
                "rank": 0,
                "world_size": 2,
                "rpc_backend_options": options,
            }
        ]


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "rank", "world_size", "text"),
        [
            (1, 0, 1, r"name must be a str, got 1"),
            ("me", "0", 1, r"`rank` must be an integer, got '0'"),
            ("me", True, 1, r"`rank` must be an integer, got True"),
            ("me", 0, 1.0, r"`world_size` must be an integer, got 1.0"),
        ],
    )
    def test_one_of_a_wrong_type_is_refused_before_anything_is_opened(
        self, opened, name, rank, world_size, text
    ):
        with pytest.raises(ArgumentTypeError, match=text):
            open_backend(OURS, None, name, rank, world_size, in_group(), Settings(), api.user_api)
        assert not opened.keys

    def test_a_process_with_an_agent_gets_no_second_one(self, opened, monkeypatch):
        monkeypatch.setattr(current, "is_set", lambda: True)
        with pytest.raises(RpcError, match=r"already initialized.*rpc\.init_group"):
            open_backend(OURS, None, "me", 0, 1, in_group(), Settings(), api.user_api)
        assert not opened.keys

    @pytest.mark.parametrize("name", ["", "two words", "a/b", "x" * 200])
    def test_an_invalid_name_is_refused_before_anything_is_opened(self, opened, name):
        with pytest.raises(RuntimeError, match="ame"):
            make_agent(name, 0, None, in_group(), Settings(), api.user_api)
        assert not opened.keys

    def test_options_of_another_backend_are_refused(self, opened):
        options: Any = RpcBackendOptions()
        with pytest.raises(TypeError, match="must be a `TensorPipeRpcBackendOptions`"):
            make_agent("me", 0, 1, options, Settings(), api.user_api)
        assert not opened.keys

    def test_the_environment_is_asked_for_what_no_argument_says(self, join, opened):
        environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "0"}
        options = TensorPipeRpcBackendOptions()
        agent = join("me", -1, 1, options, environ=environ)
        assert agent.member.id == 0 and opened.keys[0].endswith("/10.0.0.1:29500")


class TestJoining:
    def test_workers_join_one_group_and_call_one_another(self, join):
        alice, bob = join("alice"), join("bob")
        invocation = Invocation(operator.add, (2, 3))
        assert alice.caller.sync(alice.lookup("bob"), invocation, WAIT_SECONDS) == 5
        assert bob.caller.sync(bob.lookup("alice"), invocation, WAIT_SECONDS) == 5

    def test_a_world_size_of_0_means_a_dynamic_group(self, join):
        assert join("me", world_size=0).member.world_size is None

    def test_a_member_tells_the_others_what_they_have_to_know_of_it(self, join):
        agent = join("alice")
        join("bob", restarts=-1)
        join("carol", role=Role.GUEST)
        alice, bob, carol = (agent.lookup(name) for name in ("alice", "bob", "carol"))
        found = {member.id: member.extra for member in agent.members.all()}
        assert set(found[alice.id]) == {PROCESS}
        assert found[bob.id][RESTARTS] == -1 and found[carol.id][GUEST] is True
        assert len({extra[PROCESS] for extra in found.values()}) == 1  # one process

    def test_a_refused_worker_closes_its_transport(self, join, opened):
        join("alice")
        with pytest.raises(GroupError):
            join("alice")
        first, second = opened.transports
        assert (first.closes, second.closes) == (0, 1)

    def test_so_does_one_whose_group_is_not_complete_in_time(self, join, opened):
        with pytest.raises(GroupError, match=r"waited 0\.02 s.*ranks \[1\] are missing"):
            join("alice", 0, 2, settings=Settings(init_timeout=0.02))
        assert opened.transports[0].closes == 1

    def test_so_does_one_that_is_interrupted(self, join, opened, monkeypatch):
        def interrupt(self, member, timeout):
            raise KeyboardInterrupt

        monkeypatch.setattr(MemoryDirectory, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            join("alice")
        assert opened.transports[0].closes == 1

    @pytest.mark.parametrize(
        ("device_maps", "text"),
        [
            ({"alice": {"cuda:7": "cuda:0"}}, "invalid indices"),
            ({"zoe": {"cuda:0": "cuda:0"}}, "target node"),
        ],
    )
    def test_one_with_wrong_device_maps_leaves_the_group(
        self, join, opened, monkeypatch, device_maps, text
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        options = in_group(device_maps=device_maps)
        with pytest.raises(ValueError, match=text):
            join("alice", 0, 1, options)
        assert opened.transports[0].closes == 1 and opened.left == 1
        join("alice", 0, 1)  # its name and rank are free

    def test_maps_of_workers_that_join_later_are_checked_by_these(self, join, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        join("alice", options=in_group(device_maps={"bob": {"cuda:0": "cuda:0"}}))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(ValueError, match="target devices with invalid indices"):
            join("bob", options=in_group())


class TestSettings:
    def has(self, agent, kind):
        return kind in {type(hook).__name__ for hook in agent.hooks}

    @pytest.mark.parametrize(
        ("settings", "kind"),
        [
            (Settings(profile_calls=True), "KinetoHook"),
            (Settings(log_level="DEBUG"), "CallLog"),
        ],
    )
    def test_a_hook_takes_part_where_its_setting_is_on(self, join, settings, kind):
        assert self.has(join("alice", settings=settings), kind)
        off = Settings(profile_calls=False, log_level="INFO")
        assert not self.has(join("bob", settings=off), kind)

    def test_an_interrupt_cancels_calls_only_where_that_is_on(self, join):
        on = join("alice", settings=Settings(cancel_on_interrupt=True))
        off = join("bob", settings=Settings(cancel_on_interrupt=False))
        assert on.caller.on_interrupted_wait == on.cancelling.notify
        assert off.caller.on_interrupted_wait != off.cancelling.notify

    def test_the_watch_of_the_actor_ends_with_the_agent(self, join, monkeypatch):
        ended = []
        monkeypatch.setattr(startup, "watch_actor", lambda _: lambda: ended.append(True))
        agent = join("alice")
        assert not ended
        agent.shutdown()
        assert ended == [True]

    def test_a_worker_whose_actor_ray_ends_leaves_its_group(self, join, monkeypatch):
        watched = []
        monkeypatch.setattr(
            startup, "watch_actor", lambda on_exit: watched.append(on_exit) or (lambda: None)
        )
        alice = join("alice")
        bob = join("bob")
        watched[0]()
        assert [member.name for member in bob.members.all()] == ["bob"]
        assert alice.has_left or not alice.members.all()[1:]
