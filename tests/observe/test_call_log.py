"""Under ``log_level: DEBUG`` each call is a line where it is sent, run and answered."""

import logging
import re

import pytest
import torch
from memory_workers import memory_group

import rayrpc as rpc
from rayrpc import config
from rayrpc._observe.call_log import CallLog


def add(x, y=1):
    return x + y


def fails(x):
    raise ValueError("no")


@pytest.fixture
def pair(caplog):
    caplog.set_level(logging.DEBUG, "rayrpc")
    with memory_group() as start:
        a, b = (start(name) for name in "ab")
        for worker in a, b:
            worker.agent.hooks.append(CallLog(worker.agent))
        yield a, b


def test_a_call_is_logged_where_it_is_sent_run_and_answered(pair, caplog):
    a, b = pair
    caplog.clear()
    a.sync(b, add, torch.ones(1000))
    sent, runs, ran, answered = caplog.messages
    found = re.fullmatch(r"a calls test_call_log.add on b \(sync, (\d+) bytes\)", sent)
    size = int(found[1]) if found else 0
    assert size > 4000
    assert re.fullmatch(r"b runs test_call_log.add for a, [\d.]+ ms after its arrival", runs)
    assert re.fullmatch(r"b: test_call_log.add returned after [\d.]+ ms", ran)
    assert re.fullmatch(r"a has the answer of b to test_call_log.add after [\d.]+ ms", answered)


def test_errors_and_rrefs_are_logged(pair, caplog):
    a, b = pair
    caplog.clear()
    with pytest.raises(ValueError, match="no"):
        a.sync(b, fails, 1)
    assert re.fullmatch(r"b: test_call_log.fails raised ValueError after .*", caplog.messages[-1])
    caplog.clear()
    assert a.remote(b, add, 1).to_here() == 2
    text = caplog.text
    assert "a calls test_call_log.add on b (remote, " in text
    assert "a calls RRef.to_here on b (fetch, 0 bytes)" in text
    assert "a has the answer of b to RRef.to_here after " in text


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("level", ["DEBUG", "INFO"])
def test_the_setting_turns_it_on(caplog, level):
    before = config.settings()
    logger = logging.getLogger("rayrpc")
    level_before = logger.level
    try:
        rpc.configure(log_level=level)
        caplog.set_level(level, "rayrpc")
        options = rpc.TensorPipeRpcBackendOptions(init_method="ray://logged")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        assert rpc.rpc_sync("alone", add, args=(1,)) == 2
    finally:
        config.use(before)
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown()
        logger.setLevel(level_before)
    assert ("alone calls test_call_log.add on alone" in caplog.text) == (level == "DEBUG")
    assert ("alone has joined group " in caplog.text) == (level == "DEBUG")
