"""Functions that go by value find one another's globals, and what their program has changed."""

import os
import random
import sys
import threading
import time
import types
import uuid
from typing import Any

import pytest
import torch
from decoding_peer import Peer, make_codec

from rayrpc._runtime.serialization import global_versions, shared_globals
from rayrpc.errors import SerializationError

pytestmark = pytest.mark.process

SOURCE = """
import collections
import time
import torch

server, log, step, both = None, [], 0, 0
weights = torch.zeros(3)
table = {"log": log}
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1)


def bind(value):
    global server
    server = value


def unbind():
    global server
    del server


def get():
    return server


def begin():
    global made_there
    made_there = "made"


def find():
    return made_there


def add(value):
    log.append(value)
    return scaled(value)


def scaled(value):
    return value * (step + 1)


def see():
    return list(log), step


def see_table():
    return list(log), table["log"] is log


def infer():
    return model(torch.ones(1)).item()


def train():
    optimizer.zero_grad()
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    return model.weight.item()


def see_all():
    return get(), see(), Counter.made, counter.made_here


def bind_both(value):
    global both
    both = value
    return both, step


def get_both():
    return both, step


class Counter:
    made = 0

    def __init__(self):
        self.made_here = 0

    def count(self):
        Counter.made += 1
        self.made_here += 1
        return Counter.made, self.made_here, step


counter = Counter()


def count():
    return counter.count()


def add_weights():
    weights.add_(1)
    return weights.tolist()


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def count_calls():
    count_calls.calls = getattr(count_calls, "calls", 0) + 1
    return count_calls.calls


def set_by_name(value):
    globals()["server"] = value


def parse(text):
    return time.strptime(text, "%Y").tm_year + step


def parse_and_bind(text):
    global server
    server = time.strptime(text, "%Y").tm_year + step
    return server
"""


@pytest.fixture(scope="module")
def peers():
    processes = [Peer() for _ in range(2)]
    yield processes
    for process in processes:
        process.end()


@pytest.fixture
def peer(peers):
    return peers[0]


@pytest.fixture
def other(peers):
    return peers[1]


@pytest.fixture
def program(monkeypatch):
    main = types.ModuleType("__main__")
    exec(SOURCE, main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    be_another_process(monkeypatch)
    return main


def be_another_process(monkeypatch):
    monkeypatch.setattr(global_versions, "_ids", {os.getpid(): uuid.uuid4().hex})


def test_what_a_function_binds_is_there_for_others(program, peer):
    assert peer.call(program.get) is None
    peer.call(program.bind, 5)
    assert peer.call(program.get) == 5
    assert peer.call(eval("lambda: server", program.__dict__)) == 5
    peer.call(program.set_by_name, 6)
    assert peer.call(program.get) == 6
    peer.call(program.unbind)
    with pytest.raises(RuntimeError, match="NameError: name 'server' is not defined"):
        peer.call(program.get)
    assert program.server is None


def test_c_code_that_imports_finds_the_builtins(program, peer):
    """``time.strptime`` imports; it finds the builtins by the globals of the innermost function."""
    assert peer.call(program.parse, "2020") == 2020  # with the module's globals there
    program.step = 1
    assert peer.call(program.parse, "2020") == 2021  # with globals of its own
    assert peer.call(program.parse_and_bind, "2020") == 2021
    program.step = 2
    assert peer.call(program.parse, "2020") == 2022
    code = 'lambda text: (server, time.strptime(text, "%Y").tm_year + step)'
    assert peer.call(eval(code, program.__dict__), "2020") == (2021, 2022)
    assert peer.call(program.get) == 2021


def test_a_name_that_the_program_does_not_have(program, peer):
    with pytest.raises(RuntimeError, match="NameError: name 'made_there'"):
        peer.call(program.find)
    peer.call(program.begin)
    assert peer.call(program.find) == "made"


def test_what_a_function_changes_is_there_for_others(program, peer):
    assert peer.call(program.add, 1) == 1
    assert peer.call(program.add, 2) == 2
    assert peer.call(program.see) == ([1, 2], 0)
    assert peer.call(program.add_weights) == [1, 1, 1]
    assert peer.call(program.add_weights) == [2, 2, 2]
    assert peer.call(program.count_calls) == 1
    assert peer.call(program.count_calls) == 2


def test_what_the_program_has_changed_arrives_and_the_rest_stays(program, peer):
    peer.call(program.add, 1)
    program.step = 10
    assert peer.call(program.add, 2) == 22  # by way of another function
    assert peer.call(program.see) == ([1, 2], 10)
    program.log.append("mine")
    assert peer.call(program.see) == (["mine"], 10)
    program.weights[0] = 7
    assert peer.call(program.add_weights) == [8, 1, 1]


def test_a_call_that_was_sent_before_a_change_does_not_see_it(program, peer):
    seen, scaled = [], []
    for step in range(5):
        program.step = step
        seen.append(peer.send(program.see))
        scaled.append(peer.send(eval("lambda: scaled(10)", program.__dict__)))
    assert [peer.run(number)[1] for number in seen] == [0, 1, 2, 3, 4]
    assert [peer.run(scaled[n]) for n in (4, 0, 2, 1, 3)] == [50, 10, 30, 20, 40]


def test_such_calls_see_what_others_bind_all_the_same(program, peer):
    peer.call(program.bind, 0)
    sent = []
    for step in range(3):
        program.step = step
        sent.append(peer.send(program.see_all))
    peer.call(program.bind, "bound")
    for n, number in enumerate(sent):
        server, seen, *_ = peer.run(number)
        assert server == "bound" and seen == ([], n)


def test_a_function_that_binds_names_sees_the_last_values(program, peer):
    assert peer.call(program.bind_both, 1) == (1, 0)
    program.step = 5
    assert peer.call(program.bind_both, 2) == (2, 5)
    assert peer.call(program.get_both) == (2, 5)
    program.both = 3
    assert peer.call(program.get_both) == (3, 5)


def test_a_class_keeps_its_attributes_and_an_instance_too(program, peer):
    assert [peer.call(program.count) for _ in range(2)] == [(1, 1, 0), (2, 2, 0)]
    assert peer.call(program.Counter().count) == (3, 1, 0)
    program.server = 5  # used by none of its methods
    assert peer.call(program.count) == (4, 3, 0)
    program.Counter.made = 100
    assert peer.call(program.count) == (101, 4, 0)
    program.step = 1  # used by its method, so that the class is another
    assert peer.call(program.count) == (101, 5, 1)


def test_globals_that_refer_to_one_object_do_so_there(program, peer, caplog):
    assert peer.call(program.see_table) == ([], True)
    assert peer.call(program.add, 1) == 1
    assert peer.call(program.see_table) == ([1], True)
    assert [peer.call(program.train) for _ in range(3)] == [-1, -2, -3]
    assert peer.call(program.infer) == -3
    program.step = 5
    assert peer.call(program.infer) == -3 and peer.call(program.train) == -4
    program.optimizer.param_groups[0]["lr"] = 0.5  # of the program's own, with its model
    assert peer.call(program.train) == -0.5
    assert not caplog.records


def test_that_they_do_may_be_found_late(program, peer, caplog):
    assert peer.call(program.infer) == 0
    assert [peer.call(program.train) for _ in range(2)] == [-1, -2]
    assert peer.call(program.infer) == -2
    assert "'model' of __main__ refers to an object that others refer to" in caplog.text


def test_it_may_be_found_within_one_call(program, peer):
    both = peer.send(lambda first, second: (first(), second()), program.infer, program.train)
    assert peer.run(both) == (0, -1)
    assert peer.call(program.infer) == -1


def test_such_globals_are_sent_on_together(program, peer, other):
    assert peer.call(program.train) == -1
    infer = other.keep(peer.encoded(peer.send(program.infer)))
    assert other.run(infer) == -1
    train = other.keep(peer.encoded(peer.send(program.train)))
    assert other.run(train) == other.run(infer) == -2


def test_a_function_that_is_defined_again_is_the_new_one_to_all(program, peer):
    assert peer.call(program.even, 4) is True
    exec("def odd(n):\n    return 'new'", program.__dict__)
    assert peer.call(program.even, 4) == "new"
    exec(SOURCE[SOURCE.index("def odd") : SOURCE.index("def count_calls")], program.__dict__)
    assert peer.call(program.even, 4) is True


def test_functions_come_home_to_the_module_that_they_are_of(program, peer):
    add, count = peer.send(program.add, 5), peer.send(program.count)
    func, args = make_codec().decode(peer.encoded(add), (), ())
    its_builtins = program.__builtins__
    assert func is not program.add and func(*args) == 5 and program.log == [5]
    func, _ = make_codec().decode(peer.encoded(count), (), ())
    assert func() == (1, 1, 0) and program.Counter.made == 1
    assert program.__builtins__ is its_builtins


def test_functions_are_sent_on_with_the_values_of_their_program(program, peer, other):
    peer.call(program.bind, object)
    peer.call(program.add, 1)
    get = other.keep(peer.encoded(peer.send(program.get)))
    assert other.run(get) is None  # each has its own
    other.call(program.bind, "other's")
    assert other.run(get) == "other's"
    program.step = 1
    see_all = other.keep(peer.encoded(peer.send(program.see_all)))
    server, seen, *_ = other.run(see_all)
    assert server == "other's" and seen[1] == 1
    assert peer.call(program.get) is object


def test_programs_do_not_share(program, peer, monkeypatch):
    peer.call(program.bind, 5)
    be_another_process(monkeypatch)
    assert peer.call(program.get) is None


def test_what_cannot_be_sent_says_so(program, peer):
    program.server = (each for each in ())
    with pytest.raises(SerializationError, match=r"cannot be sent to another worker.*generator"):
        peer.call(program.get)


class Model:
    """What the peer's globals are, by the words of ``shared_globals``.

    Args:
        program: its module.
    """

    USES = {
        "bind": ("server",),
        "get": ("server",),
        "add": ("log", "step"),
        "see": ("log", "step"),
        "bind_both": ("both", "step"),
        "get_both": ("both", "step"),
    }

    def __init__(self, program):
        self.program = program
        self.here: dict[str, Any] = {"server": None, "log": [], "step": 0, "both": 0}
        self.sent: dict[str, Any] = {}

    def call(self, name, *args):
        """Return what a call returns."""
        for used in self.USES[name]:
            self.receive(used)
        return getattr(self, name)(*args)

    def receive(self, name):
        """Take a global from the program if it has changed."""
        value = getattr(self.program, name)
        if self.sent.get(name) != repr(value):
            self.sent[name] = repr(value)
            self.here[name] = list(value) if isinstance(value, list) else value

    def bind(self, value):
        self.here["server"] = value

    def get(self):
        return self.here["server"]

    def add(self, value):
        self.here["log"].append(value)
        return value * (self.here["step"] + 1)

    def see(self):
        return list(self.here["log"]), self.here["step"]

    def bind_both(self, value):
        self.here["both"] = value
        return value, self.here["step"]

    def get_both(self):
        return self.here["both"], self.here["step"]


@pytest.mark.parametrize("seed", range(10))
def test_random_programs(program, peer, seed):
    choose = random.Random(seed)
    model = Model(program)
    for n in range(60):
        action = choose.choice([*Model.USES, "set step", "set both", "set server", "append"])
        if action == "append":
            program.log.append(-n)
        elif action.startswith("set"):
            setattr(program, action.split()[1], n)
        else:
            args = (n,) if action in ("bind", "add", "bind_both") else ()
            found = peer.call(getattr(program, action), *args)
            assert found == model.call(action, *args), (n, action)


def test_a_tensor_is_the_same_while_its_values_are(program, peer):
    program.weights = torch.ones(3, requires_grad=True)[:]  # a result, with the same values
    peer.call(program.see)
    assert peer.call(eval("lambda: weights.sum().item()", program.__dict__)) == 3


@pytest.fixture
def fast_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("fast_switches")
def test_functions_that_arrive_at_once_find_what_the_others_bind(program, monkeypatch):
    exec(
        "total = 0\n"
        "def count():\n"
        "    global total\n"
        "    with locks.lock: total += 1\n"
        "    return get_total\n"
        "def get_total(): return total\n",
        program.__dict__,
    )
    locks: Any = types.ModuleType("its_locks")
    locks.lock = threading.Lock()
    program.locks = locks
    monkeypatch.setitem(sys.modules, "its_locks", locks)
    codec = make_codec()
    for _ in range(150):
        be_another_process(monkeypatch)
        data = codec.encode(program.count, 1, False).data
        be_another_process(monkeypatch)
        barrier, totals = threading.Barrier(4), []

        def count(data=data, barrier=barrier, totals=totals):
            barrier.wait(10)
            totals.append(codec.decode(data, (), ())())

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert [get_total() for get_total in totals] == [4] * 4


@pytest.mark.usefixtures("fast_switches")
def test_threads_that_send_and_receive_while_the_program_changes(program, monkeypatch):
    """Each call sees one state of the program."""
    exec(
        "step = 0, 0\ndef both(): return step, again()\ndef again(): return step\n",
        program.__dict__,
    )
    codec = make_codec()
    ends = time.monotonic() + 3
    own = global_versions.this_process()
    done, failures = set(), []

    class Decoding(threading.local):
        process = own

    decoding = Decoding()
    monkeypatch.setattr(shared_globals, "this_process", lambda: decoding.process)

    def call(func):
        payload = codec.encode(func, 1, False)
        decoding.process = "another"
        try:
            return codec.decode(payload.data, payload.buffers, ())()
        finally:
            decoding.process = own

    def work(number):
        try:
            while time.monotonic() < ends:
                first, second = call(program.both)
                assert first == second, (first, second)
                done.add(number)
        except BaseException as exc:
            failures.append(exc)

    def change():
        while time.monotonic() < ends:
            program.step = (program.step[0] + 1, -program.step[0])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    threads.append(threading.Thread(target=change))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and done == set(range(4))
    assert call(program.both) == (program.step, program.step)


class Interrupted(dict):
    """A dict that is as if the first look at it began a collection, with a finalizer.

    Args:
        *args: as for a dict.
        finalize: what the finalizer does.
    """

    def __init__(self, *args, finalize):
        super().__init__(*args)
        self.finalize = finalize

    def get(self, *args):
        found = super().get(*args)
        finalize, self.finalize = self.finalize, lambda: None
        finalize()
        return found


def test_a_finalizer_may_send_functions_while_its_thread_does(program, monkeypatch):
    codec = make_codec()
    sent = []
    last = Interrupted(finalize=lambda: sent.append(codec.encode(program.see, 1, False)))
    monkeypatch.setattr(global_versions._versions, "_last", last)
    codec.encode(program.count, 1, False)
    assert len(sent) == 1


def test_a_finalizer_may_receive_functions_while_its_thread_does(program, monkeypatch):
    codec = make_codec()
    data = codec.encode(program.add, 1, False).data
    key = global_versions.this_process(), "__main__"
    be_another_process(monkeypatch)
    add = codec.decode(data, (), ())
    received = shared_globals._all[key]
    results = []
    received._newest = Interrupted(
        received._newest, finalize=lambda: results.append(codec.decode(data, (), ())(1))
    )
    results.append(codec.decode(data, (), ())(2))
    assert results == [1, 2] and add.__globals__["log"] == [1, 2]
