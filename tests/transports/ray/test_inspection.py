"""What the groups of a cluster answer to a process that is in none; Ray is a stand-in's."""

import types

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RaySystemError

from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.ray import inspection, ray_api
from rayrpc._transports.ray.directory_answers import DIRECTORY_NAME, Description
from rayrpc._transports.ray.endpoint import from_wire, to_wire
from rayrpc._transports.ray.inspection import GroupAnswers, ask_groups, describe

SILENT = "does not answer: it is stopped, or its code holds the interpreter's lock"


class Actor:
    """Answers, or raises, what it is given."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []
        self.describe = self.inspect = types.SimpleNamespace(remote=self._ask)

    def _ask(self, *args):
        self.asked.append(args)
        return [self.answer]  # a reference to it


@pytest.fixture
def actors(monkeypatch):
    """The actors that Ray knows, by namespace and name; an exception in place of one is raised."""
    known: dict = {}

    def get_actor(name, namespace):
        found = known.get((namespace, name), ValueError("no such actor"))
        if isinstance(found, Exception):
            raise found
        return found

    def get(ref, timeout):
        assert timeout is not None
        (answer,) = ref
        if isinstance(answer, Exception):
            raise answer
        return answer

    def named(all_namespaces):
        assert all_namespaces
        return [{"namespace": namespace, "name": name} for namespace, name in known]

    monkeypatch.setattr(ray.util, "list_named_actors", named)
    monkeypatch.setattr(ray_api, "get_actor", get_actor)
    monkeypatch.setattr(ray_api, "get", get)
    monkeypatch.setattr(ray_api, "submit", lambda method: method.remote())
    monkeypatch.setattr(inspection, "through_client", lambda: False)
    return known


def add_group(actors, *sessions, key="user/key", joining=(), namespace="names"):
    actors[namespace, f"{DIRECTORY_NAME}{key}"] = Actor(Description(key, sessions, joining))


def member(name, endpoint, id=0):
    """Return a member whose address leads to an actor, or to nobody."""

    def find():
        if endpoint is None:
            raise ValueError("it has ended")
        return endpoint

    return Member(f"token-{name}", name, id, address=types.SimpleNamespace(find=find))


def reply(data=b"report", kind=Kind.VALUE):
    return Actor(to_wire(Frame(kind, 0, 0, data=data)))


class TestDescribe:
    def test_a_group_is_found_by_its_key_in_its_namespace(self, actors):
        add_group(actors, [member("a", None)])
        found = describe("user/key", "names")
        assert found is not None and found.sessions[0][0].name == "a"
        assert describe("user/key", "elsewhere") is None and describe("other", "names") is None

    @pytest.mark.parametrize("error", [RaySystemError("x"), RayActorError(), GetTimeoutError()])
    def test_a_directory_that_does_not_answer_is_none(self, actors, error):
        actors["names", f"{DIRECTORY_NAME}user/key"] = Actor(error)
        assert describe("user/key", "names") is None


class TestAsk:
    def test_each_worker_answers_for_itself(self, actors):
        workers = [
            member("fine", reply()),
            member("gone", None),
            member("stopped", Actor(GetTimeoutError())),
            member("busy", Actor(None)),
            member("dead", Actor(RayActorError())),
            member("wrong", reply(kind=Kind.ERROR)),
        ]
        add_group(actors, workers)
        ((key, joining, answers),) = ask_groups(b"what", 3.0)
        assert key == "user/key" and not joining
        assert [each.name for each, _ in answers] == [each.name for each in workers]
        assert [text for _, text in answers] == [
            b"report",
            "has ended",
            SILENT,
            SILENT,
            "could not be asked: RayActorError",
            "could not report",
        ]

    def test_it_is_asked_what_is_wanted_by_nobody(self, actors):
        endpoint = reply()
        add_group(actors, [member("a", endpoint)])
        ask_groups(b"what", 3.0)
        ((wire, seconds),) = endpoint.asked
        frame = from_wire(wire)
        assert (frame.kind, frame.data, frame.src) == (Kind.INSPECT, b"what", inspection.NOBODY)
        assert seconds == 3.0

    def test_through_ray_client_the_question_has_no_buffers(self, actors, monkeypatch):
        monkeypatch.setattr(inspection, "through_client", lambda: True)
        endpoint = reply()
        add_group(actors, [member("a", endpoint)])
        ask_groups(b"what", 3.0)
        assert type(endpoint.asked[0][0]) is tuple

    def test_each_run_of_a_group_answers_and_the_first_has_those_that_wait(self, actors):
        joining = [(member("late", None), [1])]
        add_group(actors, [member("a", reply())], [member("b", reply())], joining=joining)
        first, second = ask_groups(b"what", 3.0)
        assert first.joining == joining and second.joining == []
        assert [each.answers[0][0].name for each in (first, second)] == ["a", "b"]

    def test_a_group_in_which_all_still_wait_is_told_and_an_empty_one_is_not(self, actors):
        joining = [(member("late", None), [1])]
        add_group(actors, key="waits", joining=joining)
        add_group(actors, key="empty")
        add_group(actors, [], key="over")
        assert ask_groups(b"what", 3.0) == [GroupAnswers("waits", joining, [])]

    def test_directories_that_are_gone_and_other_actors_are_passed_over(self, actors):
        actors["names", "somebody"] = Actor(AssertionError("it is asked"))
        actors["names", f"{DIRECTORY_NAME}gone"] = ValueError("it has just ended")
        actors["names", f"{DIRECTORY_NAME}cut"] = Actor(RaySystemError("its host is cut off"))
        add_group(actors, [member("a", reply())])
        add_group(actors, [member("b", reply())], namespace="others")
        found = ask_groups(b"what", 3.0)
        assert [each.answers[0][0].name for each in found] == ["a", "b"]
        assert not actors["names", "somebody"].asked
