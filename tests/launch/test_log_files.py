"""Files of what workers print."""

import pytest

from rayrpc.launch import log_files
from rayrpc.launch.display import BEGIN, END, STATUS, Text
from rayrpc.launch.log_files import LogFiles


@pytest.fixture(autouse=True)
def new_program(monkeypatch):
    monkeypatch.setattr(log_files, "_begun", set())
    return monkeypatch


def test_a_worker_has_a_file_of_all_that_it_prints(tmp_path):
    files = LogFiles(str(tmp_path / "new" / "folder"))
    files.write(
        [Text("a", 0, BEGIN), Text("a", 1, b"out\n"), Text("b", 2, b"err"), Text("a", 2, b"x")]
    )
    files.write([Text("a", 1, None), Text("a", STATUS, b"3"), Text("a", 0, END)])
    folder = tmp_path / "new" / "folder"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "a.log": b"out\nx",  # before it is closed
        "b.log": b"err",
    }
    files.close()


def test_a_program_goes_on_in_its_files_and_writes_over_those_of_an_earlier_one(
    tmp_path, new_program
):
    for text in (b"one ", b"two"):
        files = LogFiles(str(tmp_path))
        files.write([Text("a", 1, text)])
        files.close()
    assert (tmp_path / "a.log").read_bytes() == b"one two"
    new_program.setattr(log_files, "_begun", set())
    files = LogFiles(str(tmp_path))
    files.write([Text("a", 1, b"new")])
    files.close()
    assert (tmp_path / "a.log").read_bytes() == b"new"


def test_any_name_of_a_worker_is_that_of_a_file_in_the_folder(tmp_path):
    files = LogFiles(str(tmp_path))
    files.write([Text("../a b/ö", 1, b"x")])
    files.close()
    assert [path.name for path in tmp_path.iterdir()] == [".._a_b_ö.log"]


def test_a_file_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "a.log").mkdir()
    files = LogFiles(str(tmp_path))
    for _ in range(2):
        files.write([Text("a", 1, b"x"), Text("b", 1, b"y")])
    files.close()
    assert (tmp_path / "b.log").read_bytes() == b"yy"
    assert [record.getMessage() for record in caplog.records] == [
        f"what 'a' prints is not kept in {tmp_path}: [Errno 21] Is a directory: '{tmp_path}/a.log'"
    ]


def test_a_full_disk_ends_a_file_and_not_the_output(caplog):
    files = LogFiles("/dev")
    files._files["a"] = open("/dev/full", "wb")  # noqa: SIM115
    files.write([Text("a", 1, b"x")])
    files.write([Text("a", 1, b"y")])
    assert "No space left" in caplog.text and len(caplog.records) == 1
