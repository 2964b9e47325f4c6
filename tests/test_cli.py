import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import sherlorch
from sherlorch import cli

DEMO = Path(sherlorch.__file__).parent / "demo.py"


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "sherlorch", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def test_demo_shows_the_symptom_then_the_culprit() -> None:
    done = command("demo")
    assert (done.returncode, done.stderr) == (0, "")
    symptom, report = done.stdout.split('The same run inside sherlorch.trace(level="aten"):')
    assert "loss nan" in symptom
    assert "of 28,949 weights are NaN now" in symptom

    lines = DEMO.read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if "torch.log(torch.relu(" in text)
    verdict = report.strip().splitlines()[0]
    assert "aten.log.default" in verdict
    assert f"demo.py:{line}" in verdict
    assert re.search(r"model\.blocks\.[01]\.feed_forward\.gate\b", report)


def test_demo_is_plain_text_that_fits_100_columns() -> None:
    output = command("demo").stdout
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) <= 100


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"sherlorch {metadata.version('sherlorch')}\n"


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["demo", "extra"], ["--unknown"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: sherlorch")


def test_no_command_names_one() -> None:
    done = command()
    assert done.returncode == 2
    assert "sherlorch demo" in done.stderr
