"""Workers for tasks, without Ray: how many are started, and with which settings."""

import pytest

from rayrpc import config
from rayrpc.launch import task_workers


@pytest.mark.parametrize(("setting", "count"), [(2, 2), (None, 3)])
def test_there_are_as_many_as_the_setting_says_or_one_for_each_cpu(monkeypatch, setting, count):
    started = []
    monkeypatch.setattr(config, "_current", config.Settings(fork_workers=setting))
    monkeypatch.setattr(task_workers, "count_cpus", lambda: 3)
    monkeypatch.setattr(task_workers, "start_with", lambda *args: started.append(args))
    task_workers.start_task_workers("task-")
    [(settings, names)] = started
    assert names == [f"task-{number}" for number in range(count)]
    assert settings.num_worker_threads == task_workers.NUM_THREADS
    assert config.settings().num_worker_threads == 16
