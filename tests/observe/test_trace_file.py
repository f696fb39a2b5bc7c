"""The events of a trace, from what workers have recorded: calls without ends, groups, names."""

import json

import pytest

from rayrpc._concurrency.clocks import Clock
from rayrpc._observe.trace_file import INSIDE_US, REPLY_US, Made, Part, Served, Trace

MAIN, SERVES, READS = 1, 2, 3  # threads


def part(name="a", id=0, node="", group="", **options):
    return Part(name, node, id, 10 + id, group=group, **options)


def events_of(*parts, names=None, clocks=()):
    clocks = [*clocks, *[Clock()] * (len(parts) - len(clocks))]
    return Trace(zip(parts, clocks, strict=True), names).to_dict()["traceEvents"]


def of_phase(events, *phases):
    return [event for event in events if event["ph"] in phases]


def named(events, name):
    return [event for event in events if event["name"] == name]


def made(mode="sync", number=1, to=1, **times):
    return Made(number, mode, "f", to, MAIN, 1.0, **{"encoded": 1.5, **times})


def served(number=1, caller=0, arrived=2.0, taken=2.0, runs=((SERVES, 2.5, 3.0),), encoding=None):
    return Served(caller, number, "f", arrived, taken, list(runs), encoding)


class TestMade:
    def test_one_that_the_thread_waits_for_is_its_slice_until_the_reply(self):
        (call, encode) = of_phase(
            events_of(part(made=[made(ended=4.0, end_thread=MAIN, bytes=7)])), "X"
        )
        assert (call["ts"], call["dur"]) == (1e6, 3e6) and call["name"] == "f -> 1"
        assert (encode["name"], encode["ts"], encode["dur"]) == ("encode", 1e6, 0.5e6)
        assert call["args"] == {"to": "1", "bytes": 7, "key": "0:1", "state": "ok"}

    @pytest.mark.parametrize("mode", ["async", "remote"])
    def test_one_that_it_does_not_wait_for_is_beside_it_and_its_reply_a_slice(self, mode):
        events = events_of(part(made=[made(mode, ended=4.0, end_thread=READS)]))
        call, encode, reply = of_phase(events, "X")
        assert call["dur"] == encode["dur"] == 0.5e6  # the thread goes on after that
        assert (reply["name"], reply["tid"]) == ("reply: f", READS)
        assert (reply["ts"], reply["dur"]) == (4e6, REPLY_US)
        begin, end = of_phase(events, "b", "e")
        assert (begin["ts"], end["ts"]) == (1e6, 4e6)
        assert begin["id"] == end["id"] == "calls-0:1" and begin["cat"] == "calls"

    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_one_without_a_reply_ends_with_its_encoding(self, mode):
        events = events_of(part(made=[made(mode)]))
        call, _ = of_phase(events, "X")
        assert call["dur"] == 0.5e6 and call["args"]["state"] == "no reply"
        assert not of_phase(events, "b", "e", "s", "f")

    def test_one_that_was_not_encoded_has_no_length(self):
        call, encode = of_phase(events_of(part(made=[made(encoded=0.0)])), "X")
        assert call["dur"] == encode["dur"] == 0.0

    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_one_that_failed_ends_where_its_function_did_and_no_arrow_comes_back(self, mode):
        caller = part(made=[made(mode)])
        callee = part("b", 1, served=[served(runs=[(SERVES, 2.5, 3.0), (SERVES, 3.1, 3.2)])])
        events = events_of(caller, callee)
        (call,) = (each for each in named(events, "f -> b") if each["ph"] == "X")
        assert call["args"]["state"] == "error"
        assert call["dur"] == pytest.approx(2.2e6 if mode == "sync" else 0.5e6)
        ends = [event["ts"] for event in of_phase(events, "b", "e")]
        assert ends == ([] if mode == "sync" else [1e6, pytest.approx(3.2e6)])
        assert [event["name"] for event in of_phase(events, "s", "f")] == ["call", "call"]

    def test_one_that_no_thread_has_run_has_no_arrow(self):
        events = events_of(part(made=[made()]), part("b", 1, served=[served(runs=())]))
        assert not of_phase(events, "s", "f")
        assert of_phase(events, "X")[0]["args"]["state"] == "no reply"

    def test_the_arrows_begin_and_end_inside_of_the_slices(self):
        caller = part(made=[made(ended=4.0, end_thread=MAIN)])
        callee = part("b", 1, served=[served(encoding=(READS, 3.5, 3.6))])
        out, there, back, here = of_phase(events_of(caller, callee), "s", "f")
        assert (out["id"], out["pid"], out["tid"]) == ("0:1>", 0, MAIN)
        assert out["ts"] == 1.5e6 - INSIDE_US
        assert (there["id"], there["pid"], there["tid"], there["ts"]) == ("0:1>", 1, SERVES, 2.5e6)
        assert (back["id"], back["pid"], back["tid"]) == ("0:1<", 1, READS)
        assert back["ts"] == 3.6e6 - INSIDE_US
        assert (here["id"], here["pid"], here["tid"]) == ("0:1<", 0, MAIN)
        assert here["ts"] == 4e6 - INSIDE_US
        assert all(event["bp"] == "e" for event in (there, here))

    def test_the_arrow_back_to_a_thread_that_did_not_wait_is_in_the_slice_of_the_reply(self):
        caller = part(made=[made("async", ended=4.0, end_thread=READS)])
        arrows = of_phase(events_of(caller, part("b", 1, served=[served()])), "f")
        assert arrows[1]["ts"] == 4e6 + INSIDE_US and INSIDE_US < REPLY_US


class TestServed:
    def test_it_is_decoded_run_and_its_reply_encoded(self):
        callee = part("b", 1, served=[served(encoding=(SERVES, 3.0, 3.25))])
        decode, run, encode = of_phase(events_of(callee, names={0: "alice"}), "X")
        assert (decode["name"], decode["ts"], decode["dur"]) == ("decode", 2e6, 0.5e6)
        assert (run["name"], run["ts"], run["dur"]) == ("f", 2.5e6, 0.5e6)
        assert run["args"] == {"from": "alice", "key": "0:1"}
        assert (encode["name"], encode["ts"], encode["dur"]) == ("encode", 3e6, 0.25e6)

    def test_the_steps_of_a_coroutine_are_slices_with_one_decoding(self):
        runs = [(SERVES, 2.5, 2.6), (READS, 3.0, 3.1)]
        slices = of_phase(events_of(part("b", 1, served=[served(runs=runs)])), "X")
        assert [(each["name"], each["tid"]) for each in slices] == [
            ("decode", SERVES),
            ("f", SERVES),
            ("f", READS),
        ]

    def test_one_that_was_taken_at_once_was_not_queued_nor_decoded_before_it_ran(self):
        callee = part("b", 1, served=[served(runs=[(SERVES, 2.0, 3.0)])])
        events = events_of(callee)
        assert [each["name"] for each in of_phase(events, "X")] == ["f"]
        assert not of_phase(events, "b", "e")

    def test_the_time_in_the_queue_is_beside_the_threads(self):
        events = events_of(part("b", 1, served=[served(taken=2.25)]))
        begin, end = of_phase(events, "b", "e")
        assert (begin["name"], begin["cat"]) == ("queued: f", "queue")
        assert (begin["ts"], end["ts"]) == (2e6, 2.25e6)

    def test_a_caller_without_a_part_and_a_name_is_told_by_its_number(self):
        (run,) = named(events_of(part("b", 1, served=[served(caller=5)])), "f")
        assert run["args"]["from"] == "5"

    def test_a_clock_that_goes_back_makes_no_slice_of_negative_length(self):
        callee = part("b", 1, served=[served(taken=2.4, runs=[(SERVES, 2.5, 2.3)])])
        assert all(each["dur"] >= 0 for each in of_phase(events_of(callee), "X"))


class TestGroups:
    def test_equal_workers_of_two_groups_have_tracks_and_arrows_of_their_own(self):
        parts = [
            part(name, id, group=group, **what)
            for group in ("first", "second")
            for name, id, what in (
                ("a", 0, {"made": [made(ended=4.0, end_thread=MAIN)]}),
                ("b", 1, {"served": [served()]}),
            )
        ]
        events = events_of(*parts)
        tracks = {event["pid"] for event in named(events, "process_name")}
        assert len(tracks) == 4
        arrows = of_phase(events, "s", "f")
        assert len(arrows) == 8 and len({(each["id"], each["ph"]) for each in arrows}) == 8
        offsets = [each["pid"] // 1_000_000 for each in arrows]
        assert offsets == [0] * 4 + [1] * 4
        assert {event["args"]["to"] for event in named(events, "f -> b")} == {"b"}

    def test_the_parts_are_in_the_order_of_their_workers(self):
        trace = Trace([(part("b", 1), Clock()), (part("a", 0), Clock())])
        trace.add(part("c", 2), Clock(error=1e-6))
        assert [each.name for each in trace.parts] == ["a", "b", "c"]
        assert repr(trace) == "<trace of 0 calls of a, b, c>"
        errors = trace.to_dict()["otherData"]["clock_errors_us"]
        assert errors == {"a": 0.0, "b": 0.0, "c": pytest.approx(1.0)}

    def test_one_of_nobody_says_so(self):
        assert repr(Trace()) == "<trace of 0 calls of no worker>"
        assert Trace().to_dict()["traceEvents"] == []

    def test_each_sees_the_other_by_its_own_clock(self):
        """An arrow to a callee ends at the callee's time in the trace."""
        caller = part(made=[made(ended=4.0, end_thread=MAIN)])
        callee = part("b", 1, served=[served(arrived=102.0, taken=102.0, runs=[(2, 102.5, 103.0)])])
        events = events_of(caller, callee, clocks=[Clock(), Clock(100.0)])
        ends = [event["ts"] for event in of_phase(events, "s", "f")]
        assert ends == pytest.approx([1.5e6, 2.5e6, 3e6, 4e6], abs=1.0)


class TestNames:
    def test_processes_and_threads_are_named(self):
        events = of_phase(
            events_of(part("a", 3, "10.0.0.1", threads={MAIN: "main", READS: "reads"})), "M"
        )
        assert [(each["name"], each["args"]) for each in events] == [
            ("process_name", {"name": "a (10.0.0.1, pid 13)"}),
            ("process_sort_index", {"sort_index": 3}),
            ("thread_name", {"name": "main"}),
            ("thread_name", {"name": "reads"}),
        ]
        assert {each["pid"] for each in events} == {3} and events[3]["tid"] == READS

    def test_a_worker_without_a_part_is_named_by_the_group(self):
        events = events_of(part(made=[made(to=7)]), names={7: "late"})
        assert named(events, "f -> late")

    def test_a_part_knows_its_worker_better_than_the_group(self):
        events = events_of(part(made=[made()]), part("b", 1), names={1: "old"})
        assert named(events, "f -> b")


def test_it_is_written_as_the_json_of_chromes_tracing(tmp_path):
    path = tmp_path / "ünï" / "trace.json"
    path.parent.mkdir()
    trace = Trace([(part("bjørn", made=[made(ended=4.0)], dropped=3), Clock())])
    trace.write(path)
    trace.write(str(path))  # again
    found = json.loads(path.read_text())
    assert found == json.loads(json.dumps(trace.to_dict()))
    assert found["displayTimeUnit"] == "ns" and found["otherData"]["dropped_calls"] == {"bjørn": 3}
    assert len(found["traceEvents"]) == len(trace.to_dict()["traceEvents"]) > 0
