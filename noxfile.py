"""Test the oldest, the usual and the newest versions that rayrpc supports: ``make matrix``.

Three more sessions: ``libraries`` tests what comes with Ray's own libraries: Data, Train, jobs;
``browser`` tests a notebook in JupyterLab, where there is a Chromium with its driver.  ``package``
installs the built wheel, with all that it needs in turn, in an empty environment.
Each session has an environment of its own; one that cannot be installed is skipped, with the
reason.  pip's settings apply: ``PIP_INDEX_URL`` may name torch's index of CPU builds, which are
much smaller.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_venv = "yes"

VERSIONS = {
    "oldest": ("3.10", ["torch==2.5.1", "ray[client]==2.40.0"]),
    "usual": ("3.11", ["-c", "constraints.txt", "torch", "ray[client]"]),
    "newest": ("3.12", ["torch==2.15.*", "ray[client]"]),
    "libraries": ("3.11", ["-c", "constraints.txt", "torch", "ray[data,default,train]"]),
    "browser": ("3.11", ["-c", "constraints.txt", "torch", "jupyterlab", "selenium", "tqdm"]),
}
TOOLS = ["expecttest", "hypothesis", "pytest>=8", "psutil", "pytest-timeout", "tomli", "trustme"]
# Ray's own, as errors
WARNINGS = {
    "oldest": ["ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"],
}
SUITES = [
    ["-m", "unit"],
    ["tests/test_api.py", "tests/test_rrefs.py"],
    ["tests/test_autograd.py", "tests/autograd", "tests/test_optim.py", "tests/test_nn.py"],
    ["tests/test_jit.py", "tests/jit"],
]
SUITES_OF = {
    "libraries": [["tests/test_ray_libraries.py"]],
    "browser": [["tests/test_jupyterlab.py"]],
}


def _add(name: str, python: str, packages: list[str]) -> None:
    @nox.session(name=name, python=python)
    def test(session: nox.Session) -> None:
        try:
            session.install(*packages)
            session.install(*TOOLS, "-e", ".", *packages)
        except CommandFailed as exc:
            session.skip(f"pip cannot install {' '.join(packages)}: {exc}")
        ignored = [word for each in WARNINGS.get(name, []) for word in ("-W", each)]
        for suite in SUITES_OF.get(name, SUITES):
            session.run("python", "-m", "pytest", "-q", *ignored, *suite, *session.posargs)


for _name, (_python, _packages) in VERSIONS.items():
    _add(_name, _python, _packages)


@nox.session(name="package", python="3.11")
def test_package(session: nox.Session) -> None:
    """Build what is released, install the wheel in an empty environment, run the README's lines."""
    session.install("build", "twine")
    with TemporaryDirectory() as folder:  # nox's own is in the environment, which Ray refuses
        _test_package(session, Path(folder))


def _test_package(session: nox.Session, folder: Path) -> None:
    session.run("python", "-m", "build", "--outdir", str(folder))
    files = [str(path) for path in folder.glob("rayrpc-*")]
    session.run("python", "-m", "twine", "check", "--strict", *files)
    session.install("-c", "constraints.txt", *(name for name in files if name.endswith(".whl")))
    program = str(Path("tests", "readme_program.py").resolve())
    with session.chdir(folder):  # the wheel's package, not that of the checkout
        session.run("python", program)
