"""The README's program and its output; run as a script, in an environment that has rayrpc."""

import re
import subprocess
import sys
from pathlib import Path

__all__ = ["RUN_SECONDS", "program_of_the_readme"]

README = Path(__file__).resolve().parents[1] / "README.md"
RUN_SECONDS = 200


def program_of_the_readme() -> tuple[str, str]:
    """Return the README's first program, and what it prints."""
    found = re.search(
        r"^```python\n(.*?)^```\n\n```\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None, "README.md has no program with its output"
    return found[1], found[2]


def main() -> None:
    """Run the program, and compare what it prints."""
    program, expected = program_of_the_readme()
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=RUN_SECONDS
    )
    assert done.returncode == 0 and done.stdout == expected, done.stdout


if __name__ == "__main__":
    main()
