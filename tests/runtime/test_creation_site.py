"""Where an RRef was made: the line of the user's code, or the function that ``remote`` called."""

import sys
from pathlib import Path
from typing import Any

import rayrpc
from rayrpc._runtime.invocation import Invocation, prompt
from rayrpc._runtime.rrefs.creation_site import made_text, users_line


def here():
    """Return the line that calls this."""
    return sys._getframe(1).f_lineno


def test_it_is_the_line_that_calls():
    assert users_line() == (__file__, here())


def test_it_is_the_users_line_also_through_code_of_the_package():
    assert Invocation(users_line)() == (__file__, here())
    inner: Any = Invocation(users_line)
    assert Invocation(inner)() == (__file__, here())


def test_a_folder_whose_name_begins_like_the_packages_is_not_the_package():
    folder = str(Path(rayrpc.__file__).parent)
    found = []
    code = compile("found.append(users_line())", f"{folder}_more/program.py", "exec")
    exec(code, {"found": found, "users_line": users_line})
    assert found == [(f"{folder}_more/program.py", 1)]


def test_the_text_says_where_or_by_what():
    assert made_text(("program.py", 7)) == "at program.py:7"
    assert made_text(here) == "by here"
    assert made_text(None) == made_text(prompt) == ""
