import re
from pathlib import Path

import sherlorch

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def listed(readme: str) -> set[str]:
    """The names in the first column of the README's table of public names."""
    table = readme.split("<!-- public names -->")[1].split("\n\n")[1]
    return set(re.findall(r"^\| `(\w+)", table, flags=re.MULTILINE))


def test_the_readme_lists_exactly_the_public_names() -> None:
    assert listed(README) == set(sherlorch.__all__)


def test_the_table_is_read() -> None:
    rows = "| name | what |\n|---|---|\n| `trace(level)` | starts |\n| `OpNode` | a node |"
    assert listed(f"<!-- public names -->\n\n{rows}\n\n") == {"trace", "OpNode"}


def test_public_names_exist_and_are_no_modules() -> None:
    for name in sherlorch.__all__:
        assert type(getattr(sherlorch, name)).__name__ != "module", name
