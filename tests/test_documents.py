"""What documents name exists: files, modules, names, links; decisions keep their form."""

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from project_urls import PYPROJECT, local_path

ROOT = Path(__file__).resolve().parents[1]
DECISIONS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
DOCUMENTS = [
    *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# What may import Ray; every other module is in the contract that forbids it.
MAY_USE_RAY = ("rayrpc._transports.ray", "rayrpc.launch", "rayrpc.parallel")
MAX_README_BYTES = 6 * 1024
META = ROOT / "tests" / "test_meta.py"

# Paths that documents name and that a clone does not have.
NOT_OURS = {
    ".venv/bin/pre-commit": "made by make install",
    "NNNN-what-was-chosen.md": "how a decision's file is named",
    "build/bench/": "made by make bench",
    "build/docs": "made by make docs",
    "~/.ray/auth_token": "a user's",
    "script.py": "a user's script",
}
FOLDERS = ("configs", "docs", "examples", "notebooks", "rayrpc", "tests")
MAX_ARCHITECTURE_BYTES = 8192
HEADINGS = ["Context", "Choice", "Measured", "Price", "Reversed by"]  # of a decision

FENCED = re.compile(r"^```([^`\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INCLUDED = re.compile(r"```\{include\} (\S+)\n```\s*")  # all of a page of the site
FILE = re.compile(r"[\w.-]*(?:/[\w.-]+)*/?[\w-]+\.(?:ipynb|json|md|png|py|toml|txt|ya?ml)\b")
DOTTED = re.compile(r"\b(?:rayrpc|rpc)(?:\.\w+)+")
LAYERS = re.compile(r"`[\w. ]+`(?:\s*→\s*`[\w. ]+`)+")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MAKE = re.compile(r"(?:^|`)make ([a-z][\w-]*)", re.MULTILINE)


PACKAGES = sorted((ROOT / "rayrpc").rglob("__init__.py"))
TOUR = re.compile(r"^ {4}(\w+) {2,}|``(\w+)``", re.MULTILINE)


def identify(path: Path) -> str:
    return str(path.relative_to(ROOT))


def assert_none(found: Iterable[str]) -> None:
    lines = "\n".join(found)
    assert not lines, f"\n{lines}"


def prose_of(text: str) -> str:
    return FENCED.sub("", text)


def backticked(text: str) -> Iterator[str]:
    """Yield the words that stand in backticks, outside of code blocks."""
    for code in re.findall(r"`([^`]+)`", prose_of(text)):
        for word in code.split():
            yield word.strip("\"'(),;:")


def paths_in(text: str) -> Iterator[str]:
    """Yield what a document names as a path in the repository."""
    for word in backticked(text):
        if "://" not in word and (
            "/" in word.strip("/") or word.endswith("/") or FILE.fullmatch(word)
        ):
            yield word
    for language, code in FENCED.findall(text):
        if language in ("", "bash"):
            yield from FILE.findall(code)


def file_exists(path: str, document: Path) -> bool:
    """Tell whether a path exists: from the root, from the document, or as a file's mere name."""
    if path in NOT_OURS or (ROOT / path).exists() or (document.parent / path).exists():
        return True
    return "/" not in path and any(any((ROOT / folder).rglob(path)) for folder in FOLDERS)


def name_exists(name: str) -> bool:
    """Tell whether a dotted name is a module of rayrpc, or can be found in one."""
    parts = name.split(".")
    path = ROOT.joinpath(*parts)
    if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
        return True
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


def names_in(text: str) -> Iterator[str]:
    """Yield the dotted names of a text; documents call the package ``rpc``, too."""
    for name in DOTTED.findall(re.sub(r"torch\.distributed\.rpc|https://\S+", "", text)):
        if not FILE.fullmatch(name):
            yield re.sub(r"^rpc\b", "rayrpc", name)


def layers_in(text: str) -> Iterator[str]:
    """Yield the modules that an order of layers names: ``cli compat`` -> ``api``."""
    for order in LAYERS.findall(text):
        yield from order.replace("`", " ").replace("→", " ").split()


def anchors_of(document: Path) -> set[str]:
    """Return what the headings of a document can be linked by."""
    text = document.read_text()
    if included := INCLUDED.fullmatch(text):
        text = (document.parent / included[1]).read_text()
    headings = re.findall(r"^#+ (.+)$", prose_of(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def link_works(target: str, document: Path) -> bool:
    path, _, anchor = target.partition("#")
    if "://" in target:
        found = local_path(path)  # of an address of the project's own
        if found is None:
            return True
        linked = ROOT / found
    else:
        linked = document.parent / path if path else document
    return linked.exists() and (not anchor or anchor in anchors_of(linked))


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_every_path_exists(document):
    found = paths_in(document.read_text())
    assert_none(path for path in found if not file_exists(path, document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_every_name_exists(document):
    assert_none(name for name in names_in(document.read_text()) if not name_exists(name))


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_every_layer_exists(document):
    names = layers_in(document.read_text())
    assert_none(name for name in names if not name_exists(f"rayrpc.{name}"))


def test_the_architecture_has_the_layers_of_the_contract():
    (order,) = LAYERS.findall((ROOT / "ARCHITECTURE.md").read_text())
    written = [set(layer.replace("`", "").split()) for layer in order.split("→")]
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["type"] == "layers")
    assert written == [set(layer.split(" : ")) for layer in layers if layer != "__main__"]


def test_every_module_may_use_ray_or_is_in_the_contract_that_forbids_it():
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    (listed,) = (c["source_modules"] for c in contracts if "ray" in c.get("forbidden_modules", ()))
    modules = {f"rayrpc.{path.stem}" for path in (ROOT / "rayrpc").iterdir() if is_module(path)}
    transports = (ROOT / "rayrpc" / "_transports").iterdir()
    modules |= {f"rayrpc._transports.{path.stem}" for path in transports if is_module(path)}
    modules -= {"rayrpc._transports", *MAY_USE_RAY}
    assert modules == set(listed)


def is_module(path: Path) -> bool:
    """Tell whether a path is that of a module, or of a package."""
    return (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=identify)
def test_every_link_leads_somewhere(document):
    links = LINK.findall(prose_of(document.read_text()))
    assert_none(target for target in links if not link_works(target, document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_every_make_target_exists(document):
    targets = re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert_none(name for name in MAKE.findall(document.read_text()) if name not in targets)


def test_the_rules_of_the_code_name_what_exists():
    """Paths, dotted names, and the names in the tables of ``test_meta.py``."""
    text = META.read_text()
    assert_none(path for path in FILE.findall(text) if not file_exists(path, META))
    assert_none(name for name in names_in(text) if not name_exists(name))
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        if not isinstance(statement.value, ast.List | ast.Tuple | ast.Set | ast.Dict):
            continue
        words = [each.value for each in ast.walk(statement.value) if isinstance(each, ast.Constant)]
        names = [each.removesuffix(".*") for each in words if isinstance(each, str) and each]
        ours = (name for name in names if re.fullmatch(r"[\w.]+", name))
        assert_none(name for name in ours if not name_exists(f"rayrpc.{name}"))


@pytest.mark.parametrize("module", sorted((ROOT / "rayrpc").rglob("*.py")), ids=identify)
def test_a_docstring_names_what_exists(module):
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    assert_none(path for path in FILE.findall(text) if not file_exists(path, module))
    assert_none(name for name in names_in(text) if not name_exists(name))


def test_every_excused_path_is_still_named():
    named = {path for document in DOCUMENTS for path in paths_in(document.read_text())}
    assert_none(path for path in NOT_OURS if path not in named)


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_bytes()) <= MAX_README_BYTES


def test_the_links_of_the_readme_work_on_the_page_of_a_package_index():
    links = LINK.findall(prose_of((ROOT / "README.md").read_text()))
    assert_none(target for target in links if not target.startswith("https://"))


def test_the_architecture_stays_short():
    assert len((ROOT / "ARCHITECTURE.md").read_bytes()) <= MAX_ARCHITECTURE_BYTES


def title_of(decision: Path) -> str:
    return decision.read_text().splitlines()[0]


def test_decisions_are_numbered_one_after_the_other():
    numbers = [int(path.name[:4]) for path in DECISIONS]
    assert numbers == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("decision", DECISIONS, ids=identify)
def test_a_decision_has_its_headings(decision):
    text = decision.read_text()
    assert re.match(rf"# {int(decision.name[:4])}\. \S", text)
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    has_numbers = "Measured" in headings
    assert headings == [each for each in HEADINGS if each != "Measured" or has_numbers]
    parts = re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]
    assert all(part.strip() for part in parts)


def test_every_decision_is_listed():
    listed = re.findall(
        r"^(\d+\.) \[(.+)\]\((.+)\)$", (DECISIONS[0].parent / "README.md").read_text(), re.M
    )
    assert [(f"# {number} {title}", file) for number, title, file in listed] == [
        (title_of(path), path.name) for path in DECISIONS
    ]


def test_the_drawing_of_the_imports_is_up_to_date():
    spec = importlib.util.spec_from_file_location("draw_imports", ROOT / "docs" / "draw_imports.py")
    assert spec and spec.loader
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    assert drawing.PAGE.read_text() == drawing.draw(), "run python docs/draw_imports.py"


@pytest.mark.parametrize("package", PACKAGES, ids=identify)
def test_a_packages_docstring_is_a_tour_of_its_modules(package):
    tour = ast.get_docstring(ast.parse(package.read_text())) or ""
    modules = {path.stem for path in package.parent.glob("*.py")} - {"__init__", "__main__"}
    modules |= {path.parent.name for path in package.parent.glob("*/__init__.py")}
    named = {name for pair in TOUR.findall(tour) for name in pair}
    assert_none(sorted(f"does not name {module}" for module in modules - named))


@pytest.mark.parametrize("package", PACKAGES, ids=identify)
def test_what_heads_a_line_of_a_tour_is_a_module(package):
    tour = ast.get_docstring(ast.parse(package.read_text())) or ""
    heads = re.findall(r"^ {4}([a-z_]+) {2,}[^<\s]|^(?:-|\d\.) ``(\w+)``", tour, re.MULTILINE)
    folder = package.parent
    assert_none(
        f"names {name}, which is no module"
        for name in sorted({name for pair in heads for name in pair if name})
        if not (folder / f"{name}.py").exists() and not (folder / name / "__init__.py").exists()
    )
