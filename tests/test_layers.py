"""Imports point down: a file may import only from layers below its own, or from its own package."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the bottom up. A name is a module or a package below `sherlorch`; "" is the facade.
LAYERS = [
    {"errors", "weak", "compat", "health", "threads"},
    {"evidence", "source", "modules", "ops"},
    {"graph", "capture"},
    {"explain", "diagnosis", "replay"},
    {"tracers", "reports"},
    {"tracker", "checks"},
    {"passes", "guard", "pytest_plugin"},
    {"callbacks"},
    {""},
    {"demo", "commands"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
FILES = sorted((ROOT / "sherlorch").glob("**/*.py")) + sorted((ROOT / "passes").glob("**/*.py"))
FILES = [path for path in FILES if (ROOT / "sherlorch" / "passes") not in path.parents]


def unit(module: str) -> str:
    """`sherlorch.ops.table` -> `ops`."""
    return (module.split(".") + [""])[1]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "sherlorch" else ("sherlorch", *parts)
    return ".".join(part for part in parts if part != "__init__")


def imports(source: str) -> set[str]:
    """Every module of this project that `source` imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            if node.module == "sherlorch":  # a submodule, or a name of the facade
                submodules = {alias.name for alias in node.names if alias.name in RANK}
                found |= {f"sherlorch.{name}" for name in submodules}
                found |= {"sherlorch"} if len(submodules) < len(node.names) else set()
            else:
                found.add(node.module)
    assert "passes" not in {name.split(".")[0] for name in found}, "import `sherlorch.passes`, not `passes`"
    return {name for name in found if name.split(".")[0] == "sherlorch"}


def upward(module: str, source: str) -> set[str]:
    own = unit(module)
    return {name for name in imports(source) if unit(name) != own and RANK[unit(name)] >= RANK[own]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    module = module_of(path)
    assert unit(module) in RANK, f"give `{unit(module)}` a layer in LAYERS"
    assert not upward(module, path.read_text(encoding="utf-8"))


def test_an_upward_import_is_found() -> None:
    assert upward("sherlorch.health", "def f():\n    from sherlorch.tracers import recorder") == {
        "sherlorch.tracers"
    }
    assert upward("sherlorch.graph", "from sherlorch import trace, errors") == {"sherlorch"}
    assert upward("sherlorch.source", "import sherlorch.graph") == {"sherlorch.graph"}
    assert not upward("sherlorch.ops.law", "import torch\nfrom sherlorch.ops import table")
