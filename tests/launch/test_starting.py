"""Starting workers' actors, ending them, and sending the program's folder; Ray is a stand-in's."""

import types
from typing import Any

import pytest

from rayrpc._transports.ray import ray_api
from rayrpc.config import Settings, WorkerResources
from rayrpc.errors import ConfigError, PlacementError
from rayrpc.launch import folder as folder_module
from rayrpc.launch import starting
from rayrpc.launch.program import Program
from rayrpc.launch.starting import end_hosted, send_folder, start_hosted


class Method:
    def __init__(self, result):
        self.result = result

    def remote(self, *args):
        return self.result


class _Actor:
    """A hosted worker: whether it lacks the folder."""

    def __init__(self, name="", lacks=False):
        self.name = name
        self.lacks_folder = Method(lacks)
        self.leave_group = Method(f"{name} left")


Actor: Any = _Actor


class Ray:
    """Notes what is asked of Ray."""

    def __init__(self):
        self.job = "job-1"
        self.classes, self.made, self.killed, self.put_there, self.waits = [], [], [], [], []

    def remote(self, **class_options):
        ray = self

        def decorate(cls):
            ray.classes.append((cls, class_options))

            class Remote:
                @staticmethod
                def options(**options):
                    return types.SimpleNamespace(remote=lambda *args: ray.make(options, args))

            return Remote

        return decorate

    def make(self, options, args):
        actor = Actor(args[0])
        self.made.append((actor, options, args))
        return actor

    def kill(self, actor):
        self.killed.append(actor.name)

    def get(self, values):
        return values

    def put(self, value):
        self.put_there.append(value)
        return f"ref-{len(self.put_there)}"

    def wait(self, refs, num_returns, timeout):
        self.waits.append((refs, num_returns, timeout))

    def get_runtime_context(self):
        return types.SimpleNamespace(get_job_id=lambda: self.job)


@pytest.fixture
def ray(monkeypatch):
    ray = Ray()
    monkeypatch.setattr(starting, "ray", ray)
    monkeypatch.setattr(ray_api, "submit", lambda method: method.remote())
    monkeypatch.setattr(starting, "this_node", lambda: "this node")
    monkeypatch.setattr(starting, "_sent", {})
    return ray


class TestStart:
    WANTED = {"a": WorkerResources(), "b": WorkerResources()}

    @pytest.fixture
    def placed(self, ray, monkeypatch):
        """Have all workers run at once; return what was waited for."""
        waited = []

        def wait_placed(actors, wanted, timeout):
            waited.append((dict(actors), wanted, timeout))
            return dict.fromkeys(actors, 7)

        monkeypatch.setattr(starting, "wait_placed", wait_placed)
        return waited

    def test_each_worker_is_an_actor_with_its_options_and_a_name_of_its_own(self, ray, placed):
        program = Program(environ={"A": "1"})
        settings = Settings(namespace="names", placement_timeout=3.0, log_dir="/logs")
        options = {"a": {"num_cpus": 1}, "b": {"num_gpus": 2}}
        actors, pids = start_hosted(program, settings, self.WANTED, options)
        assert list(actors) == ["a", "b"] and pids == {"a": 7, "b": 7}
        assert placed == [(actors, self.WANTED, 3.0)] and not ray.killed
        ((_, first, args), (_, second, _)) = ray.made
        assert first["num_cpus"] == 1 and second["num_gpus"] == 2
        assert first["name"].startswith("a#") and first["name"] != second["name"]
        assert first["namespace"] == "names"
        worker, sent, node, own = args
        assert (worker, sent, node) == ("a", program, "this node")
        assert own["log_dir"] is None  # its files are written where it is started
        assert own == settings.replace(log_dir=None).to_dict()

    def test_equal_names_of_two_starts_are_different_actors(self, ray, placed):
        for _ in range(2):
            start_hosted(Program(), Settings(), {"a": WorkerResources()}, {"a": {}})
        first, second = ray.made
        assert first[1]["name"] != second[1]["name"]

    @pytest.mark.parametrize("error", [PlacementError("no CPUs"), KeyboardInterrupt()])
    def test_workers_that_do_not_all_run_are_ended(self, ray, monkeypatch, error):
        def fail(*args):
            raise error

        monkeypatch.setattr(starting, "wait_placed", fail)
        with pytest.raises(type(error)):
            start_hosted(Program(), Settings(), self.WANTED, {"a": {}, "b": {}})
        assert ray.killed == ["a", "b"]


class TestEnd:
    def test_they_leave_their_group_for_a_while_and_are_killed(self, ray):
        end_hosted([Actor("a"), Actor("b")])
        assert ray.waits == [(["a left", "b left"], 2, starting.LEAVE_SECONDS)]
        assert ray.killed == ["a", "b"]

    def test_without_workers_nothing_is_waited_for(self, ray):
        end_hosted([])
        assert not ray.waits and not ray.killed


class TestFolder:
    @pytest.fixture
    def program(self, ray, tmp_path):
        tmp_path.joinpath("train.py").write_text("first")
        return Program(folder=str(tmp_path))

    def test_only_those_that_lack_it_get_it(self, ray, program):
        actors = [Actor(lacks=lacks) for lacks in (False, True, True)]
        assert send_folder(program, Settings(), actors) == [None, "ref-1", "ref-1"]
        assert len(ray.put_there) == 1

    def test_where_all_have_it_it_is_not_even_read(self, ray, program, monkeypatch):
        monkeypatch.setattr(starting, "pack", None)
        assert send_folder(program, Settings(), [Actor(), Actor()]) == [None, None]

    @pytest.mark.parametrize(
        ("settings", "has_folder"),
        [(Settings(runtime_env={"working_dir": "/there"}), True), (Settings(), False)],
        ids=["Ray sends it", "there is none"],
    )
    def test_where_it_is_not_rayrpcs_to_send_no_worker_is_asked(
        self, ray, program, settings, has_folder
    ):
        actors: list[Any] = [
            types.SimpleNamespace(),
            types.SimpleNamespace(),
        ]  # that can be asked nothing
        program = program if has_folder else Program()
        assert send_folder(program, settings, actors) == [None, None]

    def test_it_is_stored_once_for_a_job_as_long_as_it_is_the_same(self, ray, program, tmp_path):
        lacking = [Actor(lacks=True)]
        assert send_folder(program, Settings(), lacking) == ["ref-1"]
        assert send_folder(program, Settings(), lacking) == ["ref-1"]
        tmp_path.joinpath("train.py").write_text("second")
        assert send_folder(program, Settings(), lacking) == ["ref-2"]
        tmp_path.joinpath("train.py").write_text("first")  # the old one was let go
        assert send_folder(program, Settings(), lacking) == ["ref-3"]
        ray.job = "job-2"  # whose references are others
        assert send_folder(program, Settings(), lacking) == ["ref-4"]

    def test_what_the_settings_leave_out_is_not_sent(self, ray, program, tmp_path):
        send_folder(program, Settings(), [Actor(lacks=True)])
        tmp_path.joinpath("data.bin").write_bytes(b"x")
        send_folder(program, Settings(working_dir_excludes=("*.bin",)), [Actor(lacks=True)])
        assert len(ray.put_there) == 1

    def test_one_that_is_too_large_is_an_error_and_not_stored(self, ray, program, monkeypatch):
        monkeypatch.setattr(folder_module, "MAX_BYTES", 3)
        with pytest.raises(ConfigError, match=r"train\.py"):
            send_folder(program, Settings(), [Actor(lacks=True)])
        assert not ray.put_there
