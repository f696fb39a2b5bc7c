"""Metrics of workers: what is counted, and that Ray's Prometheus port has it."""

import contextlib
import importlib.util
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request

import pytest
import ray
import torch
from conftest import ROOT, eventually
from memory_workers import memory_group

import rayrpc as rpc
from rayrpc import config
from rayrpc._observe import metrics
from rayrpc._observe.metrics import Metrics
from rayrpc._protocol.metrics import METRICS

go = threading.Event()
PROMETHEUS = shutil.which("prometheus")
HAS_AGENT = importlib.util.find_spec("opencensus") is not None


class Recorded:
    """A sink that keeps all that is recorded."""

    def __init__(self):
        self.values = {}

    def record(self, name, values, labels):
        labels = {key: label for key, label in labels.items() if key not in ("group", "worker")}
        key = (name, *sorted(labels.values()))
        if METRICS[name].kind == "gauge":
            self.values[key] = values[0]
        elif METRICS[name].kind == "counter":
            assert values[0] > 0
            self.values[key] = self.values.get(key, 0) + values[0]
        else:
            self.values.setdefault(key, []).extend(values)


@pytest.fixture
def pair():
    """Two workers; the second one's metrics, and where they are recorded."""
    go.clear()
    with memory_group() as start:
        a, b = start("a", num_worker_threads=2), start("b", num_worker_threads=2)
        sink = Recorded()
        yield a, b, Metrics(b.agent, sink), sink.values, start
        go.set()


def begun(recorder):
    """Count from now on, and record by hand."""
    recorder._agent.callee.before_reply(recorder._note)


def double(x):
    return 2 * x


def fails():
    raise KeyError("x")


def blocks():
    go.wait(60)


def test_calls_are_counted_by_function_and_caller(pair):
    a, b, recorder, values, _ = pair
    begun(recorder)
    for _ in range(3):
        a.sync(b, double, 1)
    with pytest.raises(KeyError):
        a.sync(b, fails)
    b.sync(a, double, 1)
    recorder.record()
    name = "test_metrics.double"
    assert values["rayrpc_calls_served", "a", name] == 3
    assert ("rayrpc_call_errors", "a", name) not in values
    assert values["rayrpc_call_errors", "a", "test_metrics.fails"] == 1
    times = values["rayrpc_call_seconds", "a", name]
    assert len(times) == 3 and all(0 < seconds < 60 for seconds in times)
    assert values["rayrpc_calls_made",] == 1
    assert not [key for key in values if key[0] == "rayrpc_sent_bytes"]  # memory has no ways
    recorder.record()
    assert values["rayrpc_calls_served", "a", name] == 3  # counters grow by what is new


def test_what_is_under_way_is_a_gauge(pair):
    a, b, recorder, values, _ = pair
    futures = [a.future(b, blocks) for _ in range(3)]
    b.future(a, blocks)
    rref = b.remote(a, double, 1)
    assert eventually(lambda: b.agent.slots.waiting == 1)
    recorder.record()
    assert values["rayrpc_busy_slots",] == 2 and values["rayrpc_queued_calls",] == 1
    assert values["rayrpc_open_calls",] >= 1 and values["rayrpc_rrefs_held",] == 1
    assert values["rayrpc_members",] == 2
    go.set()
    for future in futures:
        future.wait()
    del rref
    assert eventually(lambda: a.is_empty() and b.is_empty())
    recorder.record()
    assert values["rayrpc_busy_slots",] == values["rayrpc_queued_calls",] == 0
    assert values["rayrpc_rrefs_held",] == 0


def test_bytes_are_counted_by_way(pair):
    _, b, recorder, values, _ = pair
    sent = {"connection": 10, "ray": 0}
    b.agent.sent_bytes = lambda: dict(sent)
    recorder.record()
    sent.update(connection=15, ray=3)
    recorder.record()
    assert (
        values["rayrpc_sent_bytes", "connection"] == 15 and values["rayrpc_sent_bytes", "ray"] == 3
    )


def test_what_several_threads_record_is_recorded_once(pair):
    """The thread may record while a worker that shuts down does."""
    _, b, recorder, values, _ = pair
    sent = itertools.count(1)
    b.agent.sent_bytes = lambda: {"connection": next(sent)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: [recorder.record() for _ in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert values["rayrpc_sent_bytes", "connection"] == 800


def test_calls_made_between_two_looks_are_not_lost(pair, monkeypatch):
    _, b, recorder, values, _ = pair
    looks = itertools.count(1)
    monkeypatch.setattr(
        type(b.agent.caller), "sent", property(lambda _: next(looks)), raising=False
    )
    recorder.record()
    recorder.record()
    assert values["rayrpc_calls_made",] == next(looks) - 1


class Nameless:
    def __getattr__(self, name):
        raise RuntimeError if name == "__qualname__" else AttributeError(name)

    def __call__(self):
        return 3


def test_a_function_whose_name_raises_is_replied_to(pair):
    a, b, recorder, values, _ = pair
    begun(recorder)
    assert a.sync(b, Nameless()) == 3
    recorder.record()
    assert values["rayrpc_calls_served", "a", "other"] == 1


def test_joins_and_deaths_are_counted(pair):
    _, b, recorder, values, start = pair
    c = start("c")
    assert eventually(lambda: len(b.agent.members.all()) == 3)
    recorder.record()
    assert values["rayrpc_joins",] == 1 and ("rayrpc_leaves",) not in values
    c.die()
    assert eventually(lambda: len(b.agent.members.all()) == 2)
    recorder.record()
    assert values["rayrpc_leaves",] == 1 and values["rayrpc_members",] == 2


def test_many_functions_share_a_label_and_many_times_are_left_out(pair, monkeypatch):
    a, b, recorder, values, _ = pair
    monkeypatch.setattr(metrics, "MOST_SERIES", 1)
    monkeypatch.setattr(metrics, "MOST_TIMES", 3)
    begun(recorder)
    for _ in range(4):
        a.sync(b, double, 1)
        a.sync(b, len, "x")
    recorder.record()
    assert values["rayrpc_calls_served", "a", "test_metrics.double"] == 4
    assert values["rayrpc_calls_served", "other", "other"] == 4
    times = [each for key, each in values.items() if key[0] == "rayrpc_call_seconds"]
    assert sum(map(len, times)) == 3


def test_a_sink_that_fails_ends_nothing(pair, caplog):
    a, b, recorder, _, _ = pair

    def record(*_):
        raise RuntimeError("no agent")

    recorder._sink.record = record
    recorder.start()
    recorder.close()
    recorder.close()
    assert a.sync(b, double, 2) == 4
    assert "ERROR" not in caplog.text


@pytest.mark.skipif(HAS_AGENT, reason="ray[default] is installed: there is a port")
@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_without_a_port_is_told_once(caplog):
    before = rpc.settings()
    rpc.configure(metrics=True)
    try:
        rpc.start_workers(["carol"], me="me")
        (record,) = [each for each in caplog.records if "metrics" in each.getMessage()]
        address = ray.nodes()[0]["NodeManagerAddress"]
        assert f"no port to read them at on {address}: install" in record.getMessage()
        assert "rayrpc[metrics]" in record.getMessage()
    finally:
        rpc.shutdown()
        config.use(before)


@pytest.mark.skipif(not HAS_AGENT, reason="ray[default] is not installed: no port has metrics")
@pytest.mark.usefixtures("ray_cluster")
def test_rays_prometheus_port_has_the_metrics_of_all_workers(monkeypatch):
    monkeypatch.setattr(metrics, "RECORD_SECONDS", 0.2)
    before = rpc.settings()
    rpc.configure(metrics=True)
    try:
        rpc.start_workers(["carol"], me="me")
        for _ in range(7):
            rpc.rpc_sync("carol", double, args=(1,))
        rpc.rpc_sync("carol", rpc.rpc_sync, args=("me", double, (2,)))
        group = rpc._get_current_rpc_agent().key
        here = 'worker="me"'

        def is_there():
            lines = scraped().splitlines()
            of_me = [line for line in lines if here in line and f'group="{group}"' in line]
            of_carol = [line for line in lines if 'worker="carol"' in line and group in line]
            return (
                any("rayrpc_calls_made_total" in line and line.endswith(" 8.0") for line in of_me)
                and any('function="test_metrics.double"' in line for line in of_me)
                and any('caller="me"' in line and "_bucket" in line for line in of_carol)
            )

        assert eventually(is_there, 60), "\n".join(
            line for line in scraped().splitlines() if "rayrpc" in line
        )
    finally:
        rpc.shutdown()
        config.use(before)


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus")
@pytest.mark.skipif(not HAS_AGENT, reason="ray[default] is not installed: no port has metrics")
@pytest.mark.usefixtures("ray_cluster")
def test_a_real_prometheus_answers_what_the_dashboard_asks(monkeypatch, start_server):
    monkeypatch.setattr(metrics, "RECORD_SECONDS", 0.2)
    before = rpc.settings()
    rpc.configure(metrics=True)
    try:
        rpc.start_workers(["carol"], me="me")
        group = rpc._get_current_rpc_agent().key
        (node,) = ray.nodes()
        server = start_server(f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}")
        kept = rpc.remote("carol", double, args=(torch.ones(2),))
        rpc.start_workers(["dave"]).stop()

        def call():
            with contextlib.suppress(ZeroDivisionError, RuntimeError):
                rpc.rpc_sync("carol", divide, args=(1, 0))
            rpc.rpc_sync("carol", double, args=(1,))

        missing = []

        def all_are_answered():
            call()
            missing[:] = [each for each in dashboard_asks(group) if not asked(server, each)]
            return not missing

        assert eventually(all_are_answered, 90), missing
        (row,) = asked(server, f'ray_rayrpc_members{{group="{group}",worker="me"}}')
        assert row["value"][1] == "2"
        kept.to_here()
    finally:
        rpc.shutdown()
        config.use(before)


def divide(x, y):
    return x / y


def dashboard_asks(group):
    panels = json.loads((ROOT / "configs" / "grafana.json").read_text())["panels"]
    texts = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(texts) > 10
    return [text.replace("$group", group) for text in texts]


def asked(server, query):
    address = f"http://{server}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as exc:
        pytest.fail(f"{query}: {exc.read().decode()}")
    except OSError:  # it is just starting
        return []
    assert found["status"] == "success"
    return found["data"]["result"]


@pytest.fixture
def start_server(tmp_path):
    """Start a Prometheus that reads a port; return its address."""
    processes = []

    def start(target):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        path = tmp_path / "prometheus.yml"
        path.write_text(
            "global: {scrape_interval: 1s}\n"
            f"scrape_configs: [{{job_name: ray, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        options = [
            f"--config.file={path}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
        ]
        command = [PROMETHEUS or "", *options]
        with (tmp_path / "log").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        return address

    yield start
    for process in processes:
        process.kill()
        process.wait(60)


def scraped():
    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode()


def test_the_dashboard_shows_metrics_that_there_are():
    text = (ROOT / "configs" / "grafana.json").read_text()
    dashboard = json.loads(text)
    shown = set(re.findall(r"ray_(rayrpc_\w+?)(?:_total|_bucket)?\{", text))
    assert shown == METRICS.keys() - {"rayrpc_calls_made"}
    for target in (each for panel in dashboard["panels"] for each in panel["targets"]):
        for name, suffix in re.findall(r"ray_(rayrpc_\w+?)(_total|_bucket)?\{", target["expr"]):
            kind = METRICS[name].kind
            assert suffix == {"counter": "_total", "histogram": "_bucket", "gauge": ""}[kind]
            labels = {"le", "group", "worker", *METRICS[name].labels}
            for group in re.findall(r"by \(([^)]*)\)", target["expr"]):
                assert {label.strip() for label in group.split(",")} <= labels
