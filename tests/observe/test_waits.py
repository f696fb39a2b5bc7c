"""The graph of waits: chains, states, deadlocks; and none where something can still go on."""

import random

import pytest

from rayrpc._observe.waits import Waits

SLOTS = 2


class Group:
    """Reports of workers, as a test makes them up."""

    def __init__(self, *names):
        self.reports = {
            name: {
                "name": name,
                "id": number,
                "slots": {"limit": SLOTS, "busy": 0, "queued": 0},
                "calls": [],
                "serving": [],
                "threads": [],
            }
            for number, name in enumerate(names)
        }
        self._next = 0

    def thread(self, worker, waits_for=(), serves=None, stack=(), waits_in=None):
        self._next += 1
        ident = 1000 + self._next
        self.reports[worker]["threads"].append(
            {
                "ident": ident,
                "name": f"thread{ident}",
                "is_main": serves is None,
                "waits_for": list(waits_for),
                "waits_in": waits_in,
                "serves": serves,
                "stack": list(stack),
            }
        )
        return ident

    def call(self, caller, callee, function="f", seconds=5.0, known=True):
        """Add a call; return its key."""
        self._next += 1
        key = f"{self.reports[caller]['id']}:{self._next}"
        sent = {"key": key, "to": callee, "function": function, "seconds": seconds}
        self.reports[caller]["calls"].append(sent)
        if known:
            self.reports[callee]["serving"].append(
                {
                    "key": key,
                    "from": caller,
                    "function": function,
                    "seconds": seconds,
                    "state": "queued",
                    "thread": 0,
                    "after": [],
                }
            )
        return key

    def runs(self, worker, key, waits_for=(), stack=()):
        """Have a call run in a thread that waits."""
        call = next(each for each in self.reports[worker]["serving"] if each["key"] == key)
        call["state"] = "running"
        call["thread"] = self.thread(worker, waits_for, key, stack)
        self.reports[worker]["slots"]["busy"] += 1

    def waits(self):
        return Waits(self.reports.values())


def absent(*names, where="shutdown", seconds=4.0):
    return {"where": where, "for": list(names), "seconds": seconds}


def test_a_chain_leads_to_the_worker_that_others_wait_for_in_a_shutdown():
    group = Group("a", "b", "c")
    place = {"file": "train.py", "line": 9, "function": "step", "text": "", "users": True}
    group.thread("a", waits_in=absent("c"))
    group.thread("b", waits_in=absent("a", seconds=3.0))
    group.thread("c", stack=[place])
    waits = group.waits()
    (chain,) = (each for each in waits.chains() if each[0].worker == "b")
    assert [(step.worker, step.to, step.function, step.state) for step in chain] == [
        ("b", "a", "shutdown", "absent"),
        ("a", "c", "shutdown", "absent"),
    ]
    assert chain[-1].stack == [place]
    assert [(name, wait["for"]) for name, wait in waits.absences()] == [("a", ["c"]), ("b", ["a"])]
    assert waits.deadlocks() == []


def test_a_chain_goes_on_from_a_shutdown_to_a_call():
    group = Group("a", "b", "c")
    key = group.call("b", "c", "load")
    group.thread("a", waits_in=absent("b"))
    group.thread("b", [key])
    group.runs("c", key)
    chain = max(group.waits().chains(), key=len)
    assert [(step.worker, step.to, step.function) for step in chain] == [
        ("a", "b", "shutdown"),
        ("b", "c", "load"),
    ]


@pytest.mark.parametrize("name", ["gone", "b"])
def test_a_chain_ends_at_a_worker_of_which_nothing_is_known(name):
    group = Group("a", "b")
    group.thread("a", waits_in=absent(name, where="a backward pass"))
    ((step,),) = group.waits().chains()
    assert (step.to, step.function, step.stack) == (name, "a backward pass", ())


def test_workers_that_wait_for_each_other_in_a_shutdown_are_a_chain_that_ends():
    group = Group("a", "b")
    group.thread("a", waits_in=absent("b"))
    group.thread("b", waits_in=absent("a"))
    assert [len(chain) for chain in group.waits().chains()] == [2]


def test_who_waits_for_nobody_any_more_is_in_no_chain():
    group = Group("a", "b")
    group.thread("a", waits_in=absent())
    assert group.waits().chains() == group.waits().absences() == []


def test_a_chain_ends_where_a_worker_runs_a_function():
    group = Group("a", "b", "c")
    first = group.call("a", "b", "train.step", 12.0)
    second = group.call("b", "c", "load", 3.0)
    group.thread("a", [first])
    group.runs("b", first, [second])
    group.runs("c", second, stack=[{"line": 7}])
    (chain,) = group.waits().chains()
    assert [(s.worker, s.to, s.function, s.seconds, s.state) for s in chain] == [
        ("a", "b", "train.step", 12.0, "running"),
        ("b", "c", "load", 3.0, "running"),
    ]
    assert chain[-1].stack[-1]["line"] == 7
    assert group.waits().deadlocks() == [] and group.waits().circles(1.0) == []


def test_a_chain_begins_at_a_call_that_no_thread_waits_for():
    group = Group("a", "b", "c")
    first = group.call("a", "b", "started")  # by rpc_async
    second, third = group.call("b", "c", "middle"), group.call("c", "a", "last")
    group.runs("c", second, [third])
    group.runs("b", first, [second])
    group.runs("a", third)
    (chain,) = group.waits().chains()
    assert [step.worker for step in chain] == ["b", "c"]


def test_a_circle_of_such_calls_is_one_chain():
    group = Group("a", "b")
    one, other = group.call("a", "b"), group.call("b", "a")
    group.runs("b", one, [other])
    group.runs("a", other, [one])
    (chain,) = group.waits().chains()
    assert [step.worker for step in chain] in (["a", "b"], ["b", "a"])
    assert group.waits().deadlocks() == [["a", "b"]]


def test_calls_are_listed_with_their_states_the_oldest_first():
    group = Group("a", "b")
    queued = group.call("a", "b", "queued", 1.0)
    running = group.call("a", "b", "running", 9.0)
    group.call("a", "b", "under way", 3.0, known=False)
    group.runs("b", running)
    assert [(c["function"], c["state"]) for c in group.waits().calls()] == [
        ("running", "running"),
        ("under way", "sent"),
        ("queued", "queued"),
    ]
    assert group.waits().describe(queued) == "queued on b, queued"


def test_the_callee_knows_the_name_of_a_method():
    group = Group("a", "b")
    key = group.call("a", "b", "_local_invoke")
    group.reports["b"]["serving"][0]["function"] = "run_episode"
    group.thread("a", [key])
    assert group.waits().chains()[0][0].function == "run_episode"


def test_two_workers_whose_slots_wait_for_one_another_are_a_deadlock():
    group = Group("a", "b")
    for _ in range(SLOTS):
        to_b, to_a = group.call("a", "b"), group.call("b", "a")
        group.runs("a", to_a, [group.call("a", "b", "nested")])
        group.runs("b", to_b, [group.call("b", "a", "nested")])
    waits = group.waits()
    assert waits.deadlocks() == [["a", "b"]]
    # a thread beside it that waits for such a call is stuck, but in no circle
    group.thread("a", [group.call("a", "b", "late")])
    assert group.waits().deadlocks() == [["a", "b"]]
    assert [step.state for step in group.waits().chains()[0]][:1] == ["queued"]


@pytest.mark.parametrize("escape", ["a free slot", "one that runs", "on its way", "a Future"])
def test_what_can_go_on_is_no_deadlock(escape):
    group = Group("a", "b")
    for number in range(SLOTS):
        is_last = number == SLOTS - 1
        to_b, to_a = group.call("a", "b"), group.call("b", "a")
        known = not (escape == "on its way" and is_last)
        nested = group.call("b", "a", "nested", known=known)
        group.runs("a", to_a, [group.call("a", "b", "nested")])
        if escape == "a free slot" and is_last:
            continue
        if escape == "one that runs" and is_last:
            group.runs("b", to_b)
        elif escape == "a Future" and is_last:
            served = next(e for e in group.reports["a"]["serving"] if e["key"] == nested)
            served["state"] = "waiting"
            group.runs("b", to_b, [nested])
        else:
            group.runs("b", to_b, [nested])
    assert group.waits().deadlocks() == []


def test_a_fetch_waits_for_the_call_that_makes_the_value():
    group = Group("a", "b")
    maker, fetch = group.call("a", "b", "make"), group.call("a", "b", "RRef.to_here")
    served = group.reports["b"]["serving"][1]
    served.update(state="waiting", after=[maker])
    group.thread("a", [fetch])
    group.runs("b", maker, [fetch])  # it waits for its own value
    assert group.waits().deadlocks() == [["b"]]
    steps = group.waits().chains()[0]
    assert [step.function for step in steps] == ["RRef.to_here", "RRef.to_here"]


def test_a_circle_of_workers_that_wait_is_shown_after_some_time():
    group = Group("a", "b", "c")
    keys = {}
    for caller, callee in ("ab", "bc", "ca"):
        keys[caller] = group.call(caller, callee, seconds=2.0)
        group.thread(caller, [keys[caller]])
    for caller, callee in ("ab", "bc", "ca"):
        group.runs(callee, keys[caller])  # it waits for a lock, which nobody knows
    assert group.waits().circles(1.0) == [["a", "b", "c"]]
    assert group.waits().circles(5.0) == [] and group.waits().deadlocks() == []


def test_any_reports_make_a_graph_and_every_deadlock_is_a_circle():
    rng = random.Random(5)
    found = 0
    for _ in range(600):
        names = ["a", "b", "c"][: rng.randint(1, 3)]
        group = Group(*names)
        keys = [
            (callee, group.call(rng.choice(names), callee, known=rng.random() < 0.9))
            for callee in rng.choices(names, k=rng.randint(1, 9))
        ]
        for callee, key in keys:
            serving = {call["key"] for call in group.reports[callee]["serving"]}
            slots = group.reports[callee]["slots"]
            mine = [k for k in (k for _, k in keys) if k.startswith(f"{names.index(callee)}:")]
            waited = rng.sample(mine, min(len(mine), rng.choice([0, 1, 1, 1, 2])))
            if key in serving and slots["busy"] < SLOTS and rng.random() < 0.9:
                group.runs(callee, key, waited)
        for name in names:
            mine = [k for _, k in keys if k.startswith(f"{names.index(name)}:")]
            group.thread(name, mine[:1])
        waits = group.waits()
        for circle in waits.deadlocks():
            found += 1
            for worker in circle:  # each of them does wait
                threads = group.reports[worker]["threads"]
                assert any(thread["waits_for"] for thread in threads)
        assert all(waits.chains()) and len(waits.calls()) == len(keys)
    assert found > 50
