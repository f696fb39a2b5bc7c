"""Settings: their layers, what they refuse, and where they are documented."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrpc import config
from rayrpc.config import Settings, WorkerResources, configure, load, settings, use
from rayrpc.errors import ConfigError, RpcError

ROOT = Path(__file__).resolve().parent.parent
KEYS = [field.name for field in dataclasses.fields(Settings)]
TRAINER: Any = {"num_cpus": 2}  # a mapping becomes WorkerResources
FULL = Settings(
    address="ray://head:10001",
    group="g",
    workers={"ps": WorkerResources(1, 0.5, 10**9, {"disk": 1}), "trainer*": TRAINER},
    placement_strategy="SPREAD",
    runtime_env={"env_vars": {"A": "1"}, "working_dir": Path("code"), "pip": ("x", "y")},
    local_num_cpus=4,
)


@pytest.fixture
def write(tmp_path):
    def write(text, name="rayrpc.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch):
    """Keep the settings of the machine and of other tests out, and give theirs back."""
    for variable in [name for name in os.environ if name.startswith("RAYRPC_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(config, "_current", None)


def refusal(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load(*args, **{"environ": {}, **kwargs})
    return str(caught.value)


# Layers


def test_without_any_layer_the_defaults_hold():
    assert load(environ={}) == Settings()
    assert Settings().rpc_timeout == 60.0
    assert Settings().namespace == "rayrpc"


def test_each_layer_goes_over_the_one_before(write):
    path = write("rpc_timeout: 1\ninit_timeout: 1\nplacement_timeout: 1\n")
    environ = {"RAYRPC_INIT_TIMEOUT": "2", "RAYRPC_PLACEMENT_TIMEOUT": "2"}
    loaded = load(path, environ, placement_timeout=3)
    assert loaded.num_worker_threads == 16
    assert (loaded.rpc_timeout, loaded.init_timeout, loaded.placement_timeout) == (1, 2, 3)


def test_the_file_given_is_read_instead_of_the_one_in_the_environment(write):
    environ = {"RAYRPC_CONFIG": str(write("group: named", "named.yaml"))}
    assert load(environ=environ).group == "named"
    assert load(write("group: given"), environ).group == "given"
    assert load(write("dashboard: true"), environ).group is None


def test_an_empty_file_changes_nothing(write):
    assert load(write("# nothing\n"), {}) == Settings()


def test_a_mapping_goes_over_the_one_below_it_as_a_whole(write):
    path = write("workers: {a: {num_cpus: 1}, b: {num_cpus: 1}}")
    loaded = load(path, {"RAYRPC_WORKERS": "{a: {num_cpus: 2}}"})
    assert loaded.workers == {"a": WorkerResources(num_cpus=2)}


def test_none_in_a_layer_goes_over_the_layer_below(write):
    path = write("group: from-file\nlocal_num_cpus: 4\naddress: auto\n")
    loaded = load(path, {"RAYRPC_GROUP": "none", "RAYRPC_LOCAL_NUM_CPUS": ""}, address=None)
    assert (loaded.group, loaded.local_num_cpus, loaded.address) == (None, None, None)
    assert load(write("group: none"), {}).group is None
    assert load(write("group: null"), {}).group is None
    assert load(write("group:"), {}).group is None


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("ADDRESS", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("GROUP", "1234", "1234"),
        ("RPC_TIMEOUT", "0", 0.0),
        ("RPC_TIMEOUT", " 1e3 ", 1000.0),
        ("NUM_WORKER_THREADS", "4", 4),
        ("LOCAL_NUM_CPUS", "2", 2),
        ("DASHBOARD", "1", True),
        ("DASHBOARD", "Yes", True),
        ("DASHBOARD", "on", True),
        ("LOG_TO_TERMINAL", "0", False),
        ("LOG_TO_TERMINAL", "off", False),
        ("LOG_TO_TERMINAL", "FALSE", False),
        ("LOG_LEVEL", "debug", "DEBUG"),
        ("PLACEMENT_STRATEGY", "strict_pack", "STRICT_PACK"),
        ("PLACEMENT_STRATEGY", "None", None),
        ("RUNTIME_ENV", "env_vars: {A: '1'}", {"env_vars": {"A": "1"}}),
        ("RUNTIME_ENV", "none", None),
        ("WORKERS", "{ps*: {num_gpus: 0.5}}", {"ps*": WorkerResources(num_gpus=0.5)}),
        ("WORKERS", "", {}),
    ],
)
def test_environment_text_is_read_by_the_type_of_its_key(variable, text, value):
    loaded = getattr(load(environ={f"RAYRPC_{variable}": text}), variable.lower())
    assert loaded == value
    assert type(loaded) is type(value)


def test_every_flag_is_read_from_text():
    flags = [each.name for each in dataclasses.fields(Settings) if each.type == "bool"]
    assert "cancel_on_interrupt" in flags
    for name in flags:
        for text, value in [("off", False), ("on", True)]:
            loaded = load(environ={f"RAYRPC_{name.upper()}": text})
            assert getattr(loaded, name) is value, name


def test_variables_of_others_are_left_alone():
    environ = {"RAYRPC_INTERNAL_TOKEN": "x", "RAYRPC": "x", "RAY_ADDRESS": "x", "PATH": "x"}
    assert load(environ=environ) == Settings()


# Refusals


def test_an_unknown_key_of_a_file_is_refused_with_the_nearest_key(write):
    path = write("rpc_timeot: 3")
    message = refusal(path)
    assert "'rpc_timeot'" in message
    assert "'rpc_timeout'" in message
    assert str(path) in message


def test_an_unknown_key_of_a_worker_is_refused_with_the_nearest_key(write):
    path = write("workers: {'ps*': {gpus: 3}}")
    message = refusal(path)
    assert "workers['ps*']" in message
    assert "'gpus'" in message
    assert "'num_gpus'" in message
    assert str(path) in message


def test_an_unknown_variable_is_refused_with_the_nearest_variable():
    message = refusal(environ={"RAYRPC_RPC_TIMEOUTS": "3"})
    assert "'RAYRPC_RPC_TIMEOUTS'" in message
    assert "'RAYRPC_RPC_TIMEOUT'" in message
    assert "'RAYRPC_DASHBOARD'" in refusal(environ={"RAYRPC_dashboard": "1"})
    assert "'RAYRPC_CONFIG'" in refusal(environ={"RAYRPC_CONFIGS": "x.yaml"})


def test_an_unknown_argument_is_refused_with_the_nearest_key():
    message = refusal(adress="auto")
    assert "'adress'" in message
    assert "'address'" in message
    assert "arguments" in message


def test_a_key_that_is_not_text_is_refused_as_unknown(write):
    assert "unknown key '1'" in refusal(write("1: 2"))


def test_a_wrong_value_in_a_file_names_key_file_value_and_what_is_valid(write):
    path = write("rpc_timeout: soon")
    message = refusal(path)
    for part in ("rpc_timeout", str(path), "'soon'", "seconds, 0 or more"):
        assert part in message


def test_a_wrong_value_in_the_file_of_the_environment_names_the_variable_too(write):
    message = refusal(environ={"RAYRPC_CONFIG": str(write("log_level: loud"))})
    for part in ("log_level", "RAYRPC_CONFIG", "'loud'", "DEBUG, INFO, WARNING, ERROR"):
        assert part in message


def test_a_wrong_value_in_the_environment_names_key_variable_value_and_what_is_valid():
    message = refusal(environ={"RAYRPC_RPC_TIMEOUT": "soon"})
    for part in ("rpc_timeout", "RAYRPC_RPC_TIMEOUT", "'soon'", "seconds, 0 or more"):
        assert part in message


def test_ports_are_a_range_or_one():
    assert load(environ={"RAYRPC_LISTEN_PORTS": "20000 - 20010"}).listen_ports == "20000-20010"
    assert load(environ={}, listen_ports=20000).listen_ports == "20000-20000"


def test_a_wrong_value_in_the_arguments_names_key_value_and_what_is_valid():
    message = refusal(transport="tcp")
    for part in ("transport", "arguments", "'tcp'", "auto, direct, ray"):
        assert part in message


def test_a_wrong_value_of_a_worker_names_its_pattern_and_key(write):
    message = refusal(write("workers: {'ps*': {resources: {TPU: -1}}}"))
    assert "workers['ps*'].resources['TPU']" in message


def test_a_refusal_mentions_none_only_where_none_is_valid():
    assert "or none" in refusal(local_num_cpus=0)
    assert "or none" not in refusal(num_worker_threads=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("address", "localhost"),
        ("address", "two words:1"),
        ("address", 6379),
        ("namespace", ""),
        ("namespace", None),
        ("group", 1234),
        ("transport", None),
        ("listen_host", 1),
        ("listen_ports", "any"),
        ("listen_ports", "20000-"),
        ("listen_ports", "20010-20000"),
        ("listen_ports", "0-10"),
        ("listen_ports", "65000-65536"),
        ("listen_ports", True),
        ("rpc_timeout", -1),
        ("rpc_timeout", "60"),
        ("rpc_timeout", True),
        ("rpc_timeout", float("nan")),
        ("rpc_timeout", float("inf")),
        ("rpc_timeout", None),
        ("num_worker_threads", 0),
        ("num_worker_threads", 1.5),
        ("num_worker_threads", True),
        ("init_timeout", 0),
        ("placement_timeout", -0.1),
        ("workers", ["ps"]),
        ("workers", {"ps": 1}),
        ("workers", {1: {}}),
        ("workers", {"": {}}),
        ("workers", {"ps": {"num_cpus": -1}}),
        ("workers", {"ps": {"num_gpus": 1.5}}),
        ("workers", {"ps": {"num_gpus": -1}}),
        ("workers", {"ps": {"memory": 0}}),
        ("workers", {"ps": {"memory": "4GB"}}),
        ("workers", {"ps": {"resources": {"GPU": 1}}}),
        ("workers", {"ps": {"resources": ["TPU"]}}),
        ("placement_strategy", "TIGHT"),
        ("runtime_env", "."),
        ("runtime_env", {"py_modules": [pytest]}),
        ("dashboard", "true"),
        ("dashboard", 1),
        ("local_num_cpus", -1),
        ("log_level", 10),
        ("log_to_terminal", None),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_every_way_in(key, value):
    ways = [
        lambda: load(environ={}, **{key: value}),
        lambda: Settings(**{key: value}),
        lambda: Settings.from_dict({key: value}),
        lambda: Settings().replace(**{key: value}),
    ]
    for way in ways:
        with pytest.raises(ConfigError, match=rf"^{key}\b.* must be "):
            way()


def test_worker_resources_refuse_wrong_values_on_their_own():
    with pytest.raises(ConfigError, match="num_gpus"):
        WorkerResources(num_gpus=-1)


@pytest.mark.parametrize("text", ["[1, 2]", "just text"])
def test_a_file_that_holds_no_mapping_is_refused_by_name(write, text):
    path = write(text)
    assert str(path) in refusal(path)


def test_a_file_that_cannot_be_read_is_refused_by_name(write, tmp_path):
    assert "missing.yaml" in refusal(tmp_path / "missing.yaml")
    assert "RAYRPC_CONFIG" in refusal(environ={"RAYRPC_CONFIG": str(tmp_path / "missing.yaml")})
    message = refusal(write("a: [1,\nb: 2", "broken.yaml"))
    assert "broken.yaml" in message
    assert "line 2" in message


def test_broken_yaml_in_the_environment_names_the_variable():
    message = refusal(environ={"RAYRPC_WORKERS": "{ps: "})
    assert "RAYRPC_WORKERS" in message
    assert "mapping" in message


def test_a_refusal_is_an_rpc_error_and_a_value_error():
    with pytest.raises(RpcError):
        load(environ={}, rpc_timeout=-1)
    with pytest.raises(ValueError):
        load(environ={}, rpc_timeout=-1)


# What settings are


def test_settings_are_frozen():
    frozen: Any = Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.rpc_timeout = 1
    frozen = WorkerResources()
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.num_cpus = 1


def test_settings_do_not_change_with_what_they_were_made_from():
    env = {"env_vars": {"A": "1"}}
    made = Settings(runtime_env=env)
    env["env_vars"]["A"] = "2"
    made.to_dict()["runtime_env"]["env_vars"]["A"] = "3"
    assert made.runtime_env == {"env_vars": {"A": "1"}}


@pytest.mark.parametrize("made", [Settings(), FULL], ids=["defaults", "full"])
def test_settings_survive_a_dict_yaml_and_pickle(made):
    plain = made.to_dict()
    assert Settings.from_dict(plain) == made
    assert Settings.from_dict(yaml.safe_load(yaml.safe_dump(plain))) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert list(plain) == KEYS


def test_from_dict_fills_in_defaults_and_refuses_unknown_keys():
    assert Settings.from_dict({"group": "g"}) == Settings(group="g")
    with pytest.raises(ConfigError, match="'group'"):
        Settings.from_dict({"grup": "g"})


def test_replace_changes_only_what_it_names():
    changed = FULL.replace(rpc_timeout=5)
    assert changed.rpc_timeout == 5.0
    assert changed.replace(rpc_timeout=FULL.rpc_timeout) == FULL
    with pytest.raises(ConfigError, match="'rpc_timeout'"):
        FULL.replace(timeout=5)


# Resources by name


def test_a_worker_that_matches_nothing_has_nothing_set_aside():
    assert Settings().resources_for("ps") == WorkerResources()
    assert FULL.resources_for("Trainer1") == WorkerResources()


def test_the_last_pattern_that_matches_counts_as_a_whole():
    workers: Any = {"*": {"num_cpus": 1, "memory": 5}, "train*": {"num_gpus": 1}}
    made = Settings(workers=workers)
    assert made.resources_for("ps") == WorkerResources(num_cpus=1, memory=5)
    assert made.resources_for("trainer1") == WorkerResources(num_gpus=1)


def test_an_exact_name_counts_over_every_pattern():
    workers: Any = {"ps": {"num_cpus": 2}, "*": {"num_cpus": 1}}
    made = Settings(workers=workers)
    assert made.resources_for("ps").num_cpus == 2


def test_a_name_that_looks_like_a_pattern_matches_itself():
    workers: Any = {"ps[0]": {"num_cpus": 2}}
    made = Settings(workers=workers)
    assert made.resources_for("ps[0]").num_cpus == 2
    assert made.resources_for("ps0").num_cpus == 2


def test_an_entry_with_nothing_under_it_sets_nothing_aside(write):
    made = load(write("workers:\n  '*': {num_cpus: 1}\n  ps:\n    # num_cpus: 4\n"), {})
    assert made.resources_for("ps") == WorkerResources()
    assert load(write("workers:\n"), {}).workers == {}


# The settings of a process


def test_settings_are_loaded_on_first_use_and_kept(monkeypatch):
    monkeypatch.setenv("RAYRPC_GROUP", "first")
    first = settings()
    monkeypatch.setenv("RAYRPC_GROUP", "second")
    assert first.group == "first"
    assert settings() is first


def test_configure_loads_and_makes_current(monkeypatch, write):
    monkeypatch.setenv("RAYRPC_GROUP", "from-environment")
    made = configure(write("namespace: from-file"), rpc_timeout=3)
    assert settings() is made
    assert (made.namespace, made.group, made.rpc_timeout) == ("from-file", "from-environment", 3)


def test_a_refused_configure_leaves_the_current_settings():
    before = configure(rpc_timeout=3)
    with pytest.raises(ConfigError):
        configure(rpc_timeout=-3)
    assert settings() is before


def test_use_reads_no_environment(monkeypatch):
    monkeypatch.setenv("RAYRPC_CONFIG", "/missing.yaml")
    monkeypatch.setenv("RAYRPC_GROUP", "from-environment")
    assert use(FULL) is FULL
    assert settings() is FULL


# Examples and documents


@pytest.mark.parametrize("name", ["local.yaml", "cluster.yaml"])
def test_the_example_files_load(name):
    assert load(ROOT / "configs" / name, {}) != Settings()


def test_every_key_is_in_an_example_file():
    lines = [
        line.removeprefix("# ")
        for name in ("local.yaml", "cluster.yaml")
        for line in (ROOT / "configs" / name).read_text(encoding="utf-8").splitlines()
    ]
    missing = [key for key in KEYS if not any(line.startswith(f"{key}:") for line in lines)]
    assert not missing


def test_every_key_says_what_it_means():
    keys = [*dataclasses.fields(Settings), *dataclasses.fields(WorkerResources)]
    assert not [key.name for key in keys if not key.metadata["doc"].endswith(".")]


def test_every_key_is_in_the_documentation():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert not [key for key in KEYS if f"`{key}`" not in page]


def test_importing_config_imports_neither_torch_nor_ray_nor_yaml():
    code = (
        "import sys, rayrpc.config as config\n"
        "config.load(environ={'RAYRPC_RPC_TIMEOUT': '3'}, group='g')\n"
        "sys.exit(', '.join({'torch', 'ray', 'yaml'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
