"""What is released: the sdist has all of a checkout, and the wheel runs the README's lines."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from conftest import ROOT, python_path
from project_urls import URLS, local_path
from readme_program import RUN_SECONDS, program_of_the_readme

import rayrpc

pytestmark = pytest.mark.process
BUILD_SECONDS = 200
# Of a checkout, but of no release.
NOT_RELEASED = (".gitignore",)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the sdist of this checkout."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    for name in tracked():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    python("-m", "build", "--no-isolation", "--outdir", str(folder), str(source))
    return folder


def python(*arguments: str) -> str:
    """Run Python in a process of its own; return what it prints."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked() -> list[str]:
    """Return the files of the repository, those included that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("this is no checkout of the repository")
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_the_sdist_has_all_that_a_checkout_has(built):
    with tarfile.open(one(built, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert set(tracked()) - set(NOT_RELEASED) <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("build/")]


def test_the_wheel_has_the_package_and_its_types_and_no_tests(built):
    with zipfile.ZipFile(one(built, "*.whl")) as wheel:
        names = set(wheel.namelist())
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "rayrpc").rglob("*.py")}
    assert ours | {"rayrpc/py.typed"} <= names
    others = {name for name in names if not name.startswith(("rayrpc/", "rayrpc-"))}
    assert not others


def test_the_metadata_pass_the_checks_of_a_package_index(built):
    pytest.importorskip("twine")
    files = [str(one(built, "*.whl")), str(one(built, "*.tar.gz"))]
    assert python("-m", "twine", "check", "--strict", *files).count("PASSED") == 2
    with zipfile.ZipFile(one(built, "*.whl")) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == rayrpc.__version__
    found = dict(each.split(", ", 1) for each in metadata.get_all("Project-URL", []))
    assert found == URLS
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"client", "dashboard", "notebook", "examples"} <= extras


def test_the_wheel_runs_the_lines_of_the_readme(built, start, script, tmp_path):
    site = tmp_path / "site"
    wheel = str(one(built, "*.whl"))
    python("-m", "pip", "install", "--no-deps", "--quiet", "--target", str(site), wheel)
    program, expected = program_of_the_readme()
    where = "import rayrpc; print(rayrpc.__file__)\n"
    run = start(script(where + program), PYTHONPATH=python_path(site), RAY_ADDRESS=None)
    assert run.end(RUN_SECONDS) == 0, run.output
    path, _, output = run.output.partition("\n")
    assert Path(path).parent == site / "rayrpc"
    assert output == expected


def test_the_version_is_in_the_changelog():
    assert f"## [{rayrpc.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_all_addresses_of_the_project_are_those_of_its_metadata():
    """So that there is one place to change them, and the README's, which go with it."""
    names = [name for name in tracked() if name.endswith((".md", ".py", ".toml", ".yaml", ".sh"))]
    owner = URLS["Repository"].rpartition("/")[0]
    for name in names:
        for url in re.findall(r"https://[^\s)\"'`<>#]+", (ROOT / name).read_text()):
            if "rayrpc" in url and not url.startswith(owner):
                ours = url in URLS.values() or local_path(url) is not None
                assert ours or "{" in url, f"{name}: {url}"
