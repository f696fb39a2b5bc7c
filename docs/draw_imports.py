"""Draw which packages of rayrpc import which: ``python docs/draw_imports.py`` writes the page.

The page is made from the code alone, imports inside functions and under ``TYPE_CHECKING`` included;
``tests/test_documents.py`` checks that it is up to date.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design" / "imports.md"

Graph = dict[str, set[str]]

HEAD = """# Imports

Made from the code by `docs/draw_imports.py`; do not edit it by hand. Run `python
docs/draw_imports.py` after a change of imports.

An arrow says that a module of one package imports a module of the other, at the top of the file,
inside a function or for types alone. Arrows that a longer way implies are left out of the drawing;
the table has them all. `rayrpc` is the package's own `__init__`, which loads names when they are
used. It and `compat` also import modules by their names, as texts; these are not drawn.
"""


def source_files() -> dict[str, Path]:
    """Return the file of each module, by its full name."""
    files = {}
    for path in sorted((ROOT / "rayrpc").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported_modules(name: str, files: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of rayrpc that a module imports, anywhere in its file."""
    for node in ast.walk(ast.parse(files[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_package = files[name].name == "__init__.py"
                above = name.split(".")[: None if is_package else -1]
                above = above[: len(above) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            # `from rayrpc import api` names a module, `from rayrpc.api import remote` does not
            full = [f"{base}.{alias.name}" for alias in node.names]
            found = [each if each in files else base for each in full]
        else:
            continue
        yield from (each for each in found if each in files)


def package_of(module: str) -> str:
    """Return the node that a module is part of."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def read_graph() -> Graph:
    """Return which packages each package imports."""
    files = source_files()
    graph: Graph = {package_of(name): set() for name in files}
    for name in files:
        importer = package_of(name)
        for target in imported_modules(name, files):
            if package_of(target) != importer:
                graph[importer].add(package_of(target))
    used = {node for node in graph if graph[node]}.union(*graph.values())
    return {node: graph[node] for node in graph if node in used}


def reachable(graph: Graph) -> Graph:
    """Return what each node leads to, by one arrow or more."""
    reach: Graph = {}
    for start in graph:
        found: set[str] = set()
        todo = list(graph[start])
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo.extend(graph[node])
        reach[start] = found
    return reach


def split_circles(graph: Graph) -> tuple[Graph, Graph]:
    """Return the arrows that are in no circle, and those that are."""
    reach = reachable(graph)
    down = {node: {each for each in graph[node] if node not in reach[each]} for node in graph}
    return down, {node: graph[node] - down[node] for node in graph}


def needed(graph: Graph) -> Graph:
    """Return the arrows of a graph without circles that no longer way implies."""
    reach = reachable(graph)
    return {
        node: {each for each in graph[node] if not any(each in reach[o] for o in graph[node])}
        for node in graph
    }


def heights(graph: Graph) -> dict[str, int]:
    """Return how many arrows the longest way down from each node has; without circles."""
    found: dict[str, int] = {}

    def height(node: str) -> int:
        if node not in found:
            found[node] = max((height(each) + 1 for each in graph[node]), default=0)
        return found[node]

    for node in graph:
        height(node)
    return found


def draw() -> str:
    """Return the page's text."""
    graph = read_graph()
    down, circles = split_circles(graph)
    height = heights(down)
    order = sorted(graph, key=lambda node: (-height[node], node))
    ids = {node: node.replace(".", "_") for node in order}
    arrows = needed(down)

    lines = [HEAD, "```mermaid", "flowchart TD"]
    lines += [f'    {ids[node]}["{node}"]' for node in order]
    for node in order:
        lines += [f"    {ids[node]} --> {ids[each]}" for each in order if each in arrows[node]]
        lines += [f"    {ids[node]} -. circle .-> {ids[each]}" for each in sorted(circles[node])]
    lines += ["```", ""]
    in_circles = [node for node in order if circles[node]]
    if in_circles:
        lines.append(f"In a circle: {', '.join(f'`{node}`' for node in in_circles)}.")
    else:
        lines.append(
            "There is no circle: each package imports only what is below it in this table."
        )
    lines += ["", "| package | imports |", "|---|---|"]
    for node in order:
        targets = ", ".join(f"`{each}`" for each in order if each in graph[node])
        lines.append(f"| `{node}` | {targets or 'nothing of rayrpc'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(draw(), encoding="utf-8")
