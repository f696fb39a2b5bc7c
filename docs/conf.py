"""Sphinx's configuration of the site: ``make docs``.

Pages are MyST Markdown, tutorials are the notebooks, executed when ``DOCS_EXECUTE`` is 1, and the
reference is made from the docstrings.  Links in the pages are those of the repository's files, so
that they work there, too; those to files outside of this folder lead to the repository.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))  # the package of this checkout
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URLS = PROJECT["urls"]

project = PROJECT["name"]
version = release = PROJECT["version"]
author = copyright = "the rayrpc authors"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["**.ipynb_checkpoints"]
html_theme = "furo"
html_title = f"rayrpc {version}"
html_baseurl = URLS["Documentation"]
html_theme_options = {
    "source_repository": URLS["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_prompt_text = "$ "

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
nb_execution_mode = "force" if os.environ.get("DOCS_EXECUTE") == "1" else "off"
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 240
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
napoleon_custom_sections = [("Source", "notes_style")]
napoleon_use_rtype = False

# A page that is nothing but this is the file of the repository.
INCLUDED = re.compile(r"```\{include\} \.\./([\w.-]+\.md)\n```\s*")
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]*)(#[^)\s]*)?\)")


def read_source(app: Any, page: str, source: list[str]) -> None:
    """Put the repository's file in the place of a page that includes it; adapt its links."""
    folder = posixpath.dirname(f"docs/{page}")
    if included := INCLUDED.fullmatch(source[0]):
        source[0] = (ROOT / included[1]).read_text()
        folder = ""
    if (HERE / page).with_suffix(".md").exists():
        source[0] = LINK.sub(lambda link: _adapted(link, page, folder), source[0])


def _adapted(link: re.Match[str], page: str, folder: str) -> str:
    """Return a link of a page.

    Args:
        link: as the file has it.
        page: the page's name.
        folder: that of the file, from the root of the repository.
    """
    text, target, anchor = link[1], link[2], link[3] or ""
    if not target or "://" in target or target.startswith("mailto:"):
        return link[0]
    path = posixpath.normpath(posixpath.join(folder, target))
    path = PAGES.get(path, path)
    if path.startswith("docs/") or text.startswith("!"):  # pictures become part of the site
        target = posixpath.relpath(path, posixpath.dirname(f"docs/{page}"))
    else:
        kind = "blob" if (ROOT / path).is_file() else "tree"
        target = f"{URLS['Repository']}/{kind}/main/{path}"
    return f"{text}{target}{anchor})"


def _pages() -> dict[str, str]:
    """Return the pages that are files of the repository, by the paths of those files."""
    pages = {}
    for page in HERE.glob("*.md"):
        if included := INCLUDED.fullmatch(page.read_text()):
            pages[included[1]] = f"docs/{page.name}"
    for notebook in ROOT.glob("notebooks/*.ipynb"):
        pages[f"notebooks/{notebook.name}"] = f"docs/tutorials/{notebook.name}"
    return pages


PAGES = _pages()


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return where the code of an object is, in the repository; None: it is another's."""
    found = importlib.import_module(info["module"])
    try:
        for part in info["fullname"].split("."):
            found = getattr(found, part)
        found = inspect.unwrap(found)  # type: ignore[arg-type]
        path = Path(inspect.getsourcefile(found) or "").resolve()
        line = inspect.getsourcelines(found)[1]
    except (AttributeError, OSError, TypeError):  # an attribute, or no Python code
        return None
    if ROOT / "rayrpc" not in path.parents:
        return None
    return f"{URLS['Repository']}/blob/main/{path.relative_to(ROOT)}#L{line}"


def copy_notebooks(app: Any) -> None:
    """Copy the notebooks to where Sphinx finds them."""
    for notebook in ROOT.glob("notebooks/*.ipynb"):
        target = HERE / "tutorials" / notebook.name
        if not target.exists() or target.read_bytes() != notebook.read_bytes():
            shutil.copyfile(notebook, target)


def write_commands(app: Any) -> None:
    """Write the page of the command line, from its parser."""
    from rayrpc.cli import _parser

    parser = _parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    parts = ["# Command line\n", f"{parser.description or ''}\n"]
    for name, command in commands.choices.items():
        parts += [
            f"## rayrpc {name}\n",
            f"{command.description}\n",
            "| argument | meaning |",
            "|---|---|",
        ]
        for action in command._actions:
            words = ", ".join(action.option_strings)
            value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
            words = f"{words} {value}".strip()
            parts.append(f"| `{words}` | {(action.help or '').replace('|', '/')} |")
        parts.append("")
    text = "\n".join(parts)
    page = HERE / "reference" / "commands.md"
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def setup(app: Any) -> None:
    app.connect("builder-inited", copy_notebooks)
    app.connect("builder-inited", write_commands)
    app.connect("source-read", read_source)
