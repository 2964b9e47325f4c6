"""What is packed: `passes/` as `sherlorch.passes`, once, from the tree and from its source archive."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def build(kind: str, source: Path, into: Path) -> Path:
    hatchling = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(into)]
    done = subprocess.run(hatchling, cwd=source, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    (archive,) = into.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    packed = files(wheel)
    assert {name.split("/")[0] for name in packed} == {"sherlorch", "pytest_sherlorch.py"}
    assert {"sherlorch/py.typed", "sherlorch/demo.py", "sherlorch/passes/__init__.py"} <= packed


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build("sdist", ROOT, tmp_path / "sdist")
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.13 warns without it
    with tarfile.open(archive) as packed:
        assert not any("sherlorch/passes" in name for name in packed.getnames())
        packed.extractall(tmp_path, **safe)
    source = tmp_path / archive.name[: -len(".tar.gz")]
    assert files(build("wheel", source, tmp_path / "wheel")) == files(wheel)


def test_the_wheel_imports_and_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = "import sherlorch, sherlorch.passes; print(sherlorch.__file__, sherlorch.passes.__file__)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout.split() == [
        str(tmp_path / "sherlorch" / "__init__.py"),
        str(tmp_path / "sherlorch" / "passes" / "__init__.py"),
    ]
