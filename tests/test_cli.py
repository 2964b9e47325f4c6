import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import sherlorch
from sherlorch import cli
from sherlorch.ops import GROUPS

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


# Saved reports and laws.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with sherlorch.trace() as tracker:
        y = torch.log(torch.zeros(2))
    path = tmp_path / "report.json"
    path.write_text(tracker.diagnose(y).to_json(), encoding="utf-8")
    return path


def test_a_saved_report_is_shown_and_becomes_a_page(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(saved), "--html", str(tmp_path / "page.html")]) == 1
    assert capsys.readouterr().out == json.loads(saved.read_text())["text"] + "\n"
    assert "torch.log(torch.zeros(2))" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_healthy_saved_report_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sherlorch.trace() as tracker:
        y = torch.ones(2) + 1
    (tmp_path / "report.json").write_text(tracker.diagnose(y).to_json())
    assert cli.main(["report", str(tmp_path / "report.json")]) == 0
    assert capsys.readouterr().out.startswith("No non-finite values in `y`")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read `report.json`: No such file or directory"),
        ("{", "`report.json` is not JSON"),
        (b"\xff\xfe", "`report.json` is not JSON"),
        ("[]", "is JSON, but no report of sherlorch"),
        ('{"schema": 99}', "is a report of schema 99"),
        ('{"schema": 1, "ok": 3}', "is a damaged report: `ok` should be a bool"),
        (
            '{"schema": 1, "ok": false, "text": "x", "coverage": {}, "culprits": [{}]}',
            "is a damaged report, no page can be made of it",
        ),
    ],
)
def test_no_report_is_one_clear_line(
    text: "str | bytes | None", said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("report.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main(["report", "report.json", "--html", "page.html"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sherlorch report: ")
    assert said in error
    assert error.count("\n") == 1
    assert not Path("page.html").exists()


@pytest.mark.parametrize("name", ["relu", "relu_", "aten.relu.default", "aten::relu_", "torch.relu"])
def test_the_law_of_an_op(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith("relu: bounded\n")
    assert "  law   |f(x)| <= |x| + 1\n" in out
    assert "    gelu: doubles before it halves" in out


@pytest.mark.parametrize(("name", "said"), [("exp", "overflows near"), ("mm", "every result is scanned")])
def test_an_op_without_a_law(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: no law, every result is scanned\n")
    assert said in out


def test_the_whole_table_of_laws_fits_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    for group in GROUPS:
        assert f"  {group.equation}\n" in out


def test_an_unknown_op_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", "sofmax"]) == 2
    assert capsys.readouterr().err.startswith(
        "sherlorch ops: torch has no operation called `sofmax`; did you mean `softmax`"
    )


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader = f"{sys.executable} -m sherlorch ops | head -n 1"
    done = subprocess.run(reader, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout == "permutes: the state passes exactly, both ways; nothing is scanned\n"
    assert done.stderr == ""
