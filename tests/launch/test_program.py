"""Programs: what describes one, how another process takes it over and loads it."""

import os
import pickle
import sys
import traceback
from pathlib import Path

import pytest

from rayrpc.errors import ConfigError
from rayrpc.launch import program
from rayrpc.launch.program import Program, run_as_main


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Restore what a program changes in this process; return the environment of the test."""
    environ = {"HOME": "/home", "OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    monkeypatch.chdir(tmp_path)
    return environ


def variables(environ):
    return {name: value for name, value in environ.items() if name != "PYTEST_CURRENT_TEST"}


# -- describing a process -------------------------------------------------------------------------


def test_a_program_is_described_by_what_its_process_runs(process, monkeypatch, tmp_path):
    path = tmp_path / "main.py"
    path.write_text("value = 1")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "main.py", raising=False)
    sys.argv[:] = ["main.py", "--flag"]
    sys.path[:] = ["", "/lib"]
    made = Program.of_this_process()
    assert (made.path, made.module, made.source) == (str(path), "", b"value = 1")
    assert made.argv == ["main.py", "--flag"] and made.cwd == str(tmp_path)
    assert made.sys_path == [str(tmp_path), "/lib"]
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_module_is_described_by_its_name(process, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", pytest.__spec__)
    made = Program.of_this_process()
    assert (made.module, made.path, made.source) == ("pytest", "", b"")


def test_a_console_has_no_script(process, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    made = Program.of_this_process()
    assert (made.module, made.path, made.source) == ("", "", b"")


def test_what_is_rays_or_of_one_machine_alone_is_not_sent(process):
    process |= {"RAY_ADDRESS": "h:1", "RAYRPC_INTERNAL_RUN": "1", "RAYRPC_GROUP": "g"}
    sent = Program.of_this_process().environ
    assert variables(sent) == {"HOME": "/home", "OMP_NUM_THREADS": "1", "RAYRPC_GROUP": "g"}


def test_what_the_program_changed_in_its_environment_is_noted(process, monkeypatch):
    monkeypatch.setattr(program, "_environ_at_start", {"HOME": "/home", "OMP_NUM_THREADS": "2"})
    process["MASTER_PORT"] = "29500"
    changed = Program.of_this_process().changed - {"PYTEST_CURRENT_TEST"}
    assert changed == {"MASTER_PORT", "OMP_NUM_THREADS"}


def test_workers_that_only_serve_load_no_script(process):
    made = Program.without_script()
    assert made.environ == process and made.sys_path
    assert (made.path, made.module, made.argv, made.cwd) == ("", "", [], "")


# -- taking it over -------------------------------------------------------------------------------


def test_on_the_same_node_the_whole_environment_is_the_programs(process):
    Program(environ={"HOME": "/other", "NEW": "1"}).enter(same_node=True)
    assert variables(process) == {"HOME": "/other", "NEW": "1"}


@pytest.mark.parametrize("same_node", [True, False])
def test_variables_that_a_process_keeps_are_not_the_programs(process, same_node):
    process["DEVICES"] = "3"
    theirs = {"DEVICES": "0,1,2,3", "NEW": "1"}
    made = Program(environ=theirs, changed=frozenset({"DEVICES"}))
    made.enter(same_node=same_node, kept=["DEVICES", "NOT_SET"])
    assert process["DEVICES"] == "3" and process["NEW"] == "1"
    made.enter(same_node=same_node)
    assert process["DEVICES"] == "0,1,2,3"


def test_on_another_node_only_what_is_missing_or_was_changed_is_set(process):
    del process["OMP_NUM_THREADS"]
    process["PORT"] = "1"
    theirs = {"HOME": "/other", "NEW": "1", "PORT": "2"}
    Program(environ=theirs, changed=frozenset({"PORT"})).enter(same_node=False)
    assert variables(process) == {"HOME": "/home", "NEW": "1", "PORT": "2"}


def test_the_number_of_threads_is_not_the_one_that_ray_sets(process):
    Program().enter(same_node=True)
    assert "OMP_NUM_THREADS" not in process
    Program(environ={"OMP_NUM_THREADS": "3"}).enter(same_node=True)
    assert process["OMP_NUM_THREADS"] == "3"


def test_arguments_folder_and_module_path_are_taken_over(process, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    before = list(sys.path)
    made = Program(argv=["a", "b"], cwd=str(folder), sys_path=["/theirs", before[0]])
    made.enter(same_node=True)
    assert sys.argv == ["a", "b"] and Path.cwd() == folder
    assert sys.path == ["/theirs", *before]


def test_a_folder_that_is_not_there_is_not_entered(process, tmp_path):
    Program(cwd="/missing/folder").enter(same_node=False)
    assert Path.cwd() == tmp_path


@pytest.fixture
def elsewhere(process, tmp_path):
    """Return a program whose script is in a folder that this node does not have."""
    process["PYTHONPATH"] = "/theirs/lib:/usr/lib/x"
    made = Program(
        path="/theirs/main.py",
        source=b"import part",
        argv=["/theirs/main.py", "/theirs/data"],
        sys_path=["/theirs", "/other"],
        cwd="/theirs/data",
        folder="/theirs",
    )
    made.enter(same_node=False)
    return made


def test_a_folder_that_is_missing_is_replaced(elsewhere, process, tmp_path):
    (tmp_path / "here/data").mkdir(parents=True)
    here = str(tmp_path / "here")
    assert elsewhere.lacks_folder
    made = elsewhere.move(here)
    assert (made.path, made.folder) == (f"{here}/main.py", here)
    assert os.getcwd() == f"{here}/data"
    assert sys.path[:2] == [here, "/other"]
    assert sys.argv == [f"{here}/main.py", "/theirs/data"]  # what is an argument is not known
    assert process["PYTHONPATH"] == f"{here}/lib:/usr/lib/x"


def test_a_rank_whose_folder_was_not_sent_starts_in_the_programs(elsewhere, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    elsewhere.move(str(here))
    assert Path.cwd() == here


def test_a_folder_with_another_version_of_the_script_is_none(tmp_path):
    script = tmp_path / "main.py"
    script.write_text("old")
    made = Program(path=str(script), source=b"old", folder=str(tmp_path))
    assert not made.lacks_folder
    script.write_text("new")
    assert made.lacks_folder
    script.unlink()
    assert made.lacks_folder
    assert not Program(path=str(script), source=b"old").lacks_folder


def test_the_folder_of_a_program_is_its_scripts_unless_another_is_named(process, monkeypatch):
    here = os.getcwd()
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    os.makedirs("app")
    Path("app/main.py").write_text("")
    monkeypatch.setattr(main, "__file__", "app/main.py", raising=False)
    assert Program.of_this_process().folder == f"{here}/app"
    assert Program.of_this_process(".").folder == here
    assert Program.without_script("app").folder == f"{here}/app"
    with pytest.raises(ConfigError, match=r"no folder .*missing"):
        Program.of_this_process("missing")
    monkeypatch.setattr(main, "__file__", program.__file__)
    monkeypatch.setattr(sys, "prefix", str(Path(program.__file__).parents[2]))
    assert Program.of_this_process().folder == ""  # it is installed
    monkeypatch.setattr(main, "__spec__", pytest.__spec__)
    assert Program.of_this_process().folder == here


# -- loading it -----------------------------------------------------------------------------------


def test_a_script_is_loaded_as_mp_main_which_is_main(process, tmp_path):
    path = tmp_path / "main.py"
    source = b"name = __name__\nif __name__ == '__main__':\n    raise SystemExit(1)\n"
    path.write_bytes(source)
    Program(path=str(path), source=source).load()
    main = sys.modules["__main__"]
    assert main is sys.modules["__mp_main__"]
    assert main.name == "__mp_main__" and main.__file__ == str(path)


def test_a_script_that_is_not_on_this_host_comes_with_the_program(process):
    source = b"def fail():\n    raise ValueError('as expected')\n"
    Program(path="/missing/main.py", source=source).load()
    with pytest.raises(ValueError, match="as expected") as caught:
        sys.modules["__main__"].fail()
    lines = "".join(traceback.format_exception(caught.value))
    assert "/missing/main.py" in lines and "raise ValueError('as expected')" in lines


def test_a_module_is_loaded_by_its_name(process, tmp_path):
    (tmp_path / "a_module_to_run.py").write_text("name = __name__\n")
    sys.path.insert(0, str(tmp_path))
    Program(module="a_module_to_run").load()
    assert sys.modules["__main__"].name == "__mp_main__"


def test_a_program_without_a_script_loads_nothing(process):
    before = sys.modules["__main__"]
    Program().load()
    assert sys.modules["__main__"] is before


def test_a_script_runs_as_python_would_run_it(process, tmp_path):
    path = tmp_path / "main.py"
    path.write_text("import os, sys\nfound = __name__, sys.argv, sys.path[0], os.environ['A']\n")
    run_as_main(str(path), ["--flag"], {"A": "1"})
    main = sys.modules["__main__"]
    assert main.found == ("__main__", [str(path), "--flag"], str(tmp_path), "1")


def test_a_script_that_is_missing_is_named(process):
    with pytest.raises(FileNotFoundError, match="there is no script missing"):
        run_as_main("missing.py", [])
