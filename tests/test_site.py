"""The site of the documentation: it is built without a warning, and has all public names."""

import importlib
import re

import pytest
from conftest import ROOT

REFERENCE = ROOT / "docs" / "reference"
# Modules whose pages name each member, and what is left out there: modules, and texts.
MEMBERS = {
    "rayrpc": {"RRef", "__version__", "errors", "functions", "futures"},  # RRef is PyRRef
    "rayrpc.autograd": {"DistAutogradContext", "GroupAutograd", "is_available"},
    "rayrpc.functions": set(),
    "rayrpc.futures": {"Future", "as_completed"},  # torch's, and rayrpc.as_completed
    "rayrpc.jit": {"Future", "LazyRemote"},
    "rayrpc.nn": set(),
    "rayrpc.optim": set(),
}
DIRECTIVE = re.compile(r"^\.\. auto\w+:: ([\w.]+)", re.MULTILINE)
BUILD_SECONDS = 280


@pytest.mark.process
@pytest.mark.timeout(BUILD_SECONDS + 20)
def test_the_site_is_built_without_a_warning(start, tmp_path):
    pytest.importorskip("sphinx")
    site = tmp_path / "site"
    command = ("-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html")
    folders = ("-d", str(tmp_path / "cache"), str(ROOT / "docs"), str(site))
    run = start(*command, *folders, DOCS_EXECUTE=None)
    assert run.end(BUILD_SECONDS) == 0, run.output
    page = (site / "reference" / "rpc.html").read_text()
    assert "Join a group of workers" in page and "torch.distributed.rpc.init_rpc" in page
    assert '_images/rpc.png"' in (site / "performance.html").read_text()
    assert "--watch" in (site / "reference" / "commands.html").read_text()
    assert "start_workers" in (site / "tutorials" / "01_first_steps.html").read_text()


def documented() -> set[str]:
    """Return the names that the pages of the reference have directives for."""
    return {name for page in REFERENCE.glob("*.md") for name in DIRECTIVE.findall(page.read_text())}


@pytest.mark.parametrize("module", MEMBERS)
def test_the_reference_has_each_public_name(module):
    names = set(importlib.import_module(module).__all__) - MEMBERS[module]
    assert {f"{module}.{name}" for name in names} <= documented()


def test_the_reference_has_the_modules_of_machin():
    folder = ROOT / "rayrpc" / "parallel"
    modules = {path.stem for path in folder.iterdir() if not path.name.startswith("_")}
    assert {f"rayrpc.parallel.{name}" for name in modules} <= documented()
