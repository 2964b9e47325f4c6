"""`sherlorch run`: what a person sees whose script nobody changed."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from needs import needs_eager_compiled, needs_forward_lines

from sherlorch import cli

CLASSIFIER = Path(__file__).parent / "scripts" / "train_classifier.py"
FAULTY = """
    import torch

    def main():
        x = torch.zeros(3)
        return torch.log(x)  # the fault

    if __name__ == "__main__":
        y = main()
        print("went on", y.sum().item())
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def own_program() -> Iterator[None]:
    """`run` leaves the program as `__main__`, as it should where the process ends with it."""
    main, arguments, path = sys.modules["__main__"], sys.argv, list(sys.path)
    yield
    sys.modules["__main__"], sys.argv, sys.path[:] = main, arguments, path


def command(*arguments: object, warn: str = "error", **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", warn, "-m", "sherlorch", *map(str, arguments)],
        **{"capture_output": True, "text": True, "timeout": 300, "stdin": subprocess.DEVNULL, **options},
    )


def line_of(path: Path, text: str) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


# A script as people publish them.


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_public_style_script_with_workers_and_amp_names_its_bug(start: str, tmp_path: Path) -> None:
    done = command(
        "run", "--json", tmp_path / "report.json",
        CLASSIFIER, "--amp", "--workers", 2, "--start-method", start, "--output", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    verdict = done.stdout.strip().splitlines()[0]
    assert "aten.div.Tensor (0 / 0)" in verdict
    assert f"train_classifier.py:{line_of(CLASSIFIER, 'the planted bug')}" in verdict
    assert "model.standardize" in done.stdout
    culprit = json.loads((tmp_path / "report.json").read_text())["culprits"][0]
    assert culprit["module_path"] == "model.standardize"
    assert done.stderr == ""


def test_the_same_script_without_its_bug_is_left_alone(tmp_path: Path) -> None:
    options = ("--amp", "--epochs", 1, "--blank", "--workers", 0, "--output")
    plain = subprocess.run(
        [sys.executable, CLASSIFIER, *map(str, options), tmp_path / "plain"], capture_output=True, timeout=300
    )
    assert plain.returncode == 0
    done = command("run", CLASSIFIER, *options, tmp_path / "traced")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\nNo non-finite values.\n" in done.stdout
    results = [(tmp_path / name / "result.json").read_text() for name in ("plain", "traced")]
    assert results[0] == results[1]
    assert (tmp_path / "traced" / "model.pt").exists()  # saved whole: nothing hangs on the modules


# What the program sees of it.


def test_the_program_finds_what_python_gives_it(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write("""
        import json, sys
        import helper
        names = [__name__, __file__, __package__, str(__spec__)]
        print(json.dumps([sys.argv, sys.path[0], helper.VALUE, *names]))
        assert sys.modules["__main__"].__dict__ is globals()
        sys.exit(5)
    """)
    write("VALUE = 3", "helper.py")
    plain = subprocess.run(
        [sys.executable, script, "--level", "x", "--", "-m", "--html"], capture_output=True, text=True
    )
    code = cli.main(["run", "--level", "function", str(script), "--level", "x", "--", "-m", "--html"])
    assert code == plain.returncode == 5
    assert capsys.readouterr().out.splitlines()[0] == plain.stdout.strip()


def test_a_module_runs_as_with_python_m(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("", "package_to_run/__init__.py")
    path = write(
        """
        import sys
        import torch
        from . import __path__
        print(sys.argv[1:], __name__, __package__, __spec__.name)
        torch.zeros(1) / 0
        """,
        "package_to_run/__main__.py",
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "-m", "package_to_run", "--lr", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "['--lr', '1'] __main__ package_to_run package_to_run.__main__"
    assert f"__main__.py:{line_of(path, '/ 0')}" in lines[2]


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [("sys.exit()", 0, ""), ("sys.exit('no data')", 1, "no data\n"), ("raise SystemExit(7)", 7, "")],
)
def test_exit_codes_are_kept(
    ending: str, code: int, said: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(write(f"import sys\n{ending}"))]) == code
    assert capsys.readouterr().err == said


def test_an_error_of_the_program_is_shown_as_python_shows_it(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write("""
        def main():
            raise ValueError("the data is gone")
        main()
    """)
    assert cli.main(["run", str(script)]) == 1
    captured = capsys.readouterr()
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert re.sub(r"\s+[~^]+\n", "\n", captured.err) == re.sub(r"\s+[~^]+\n", "\n", plain.stderr)
    assert "No non-finite values." in captured.out


def test_a_syntax_error_is_the_programs_own(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(write("x = = 1"))]) == 1
    assert "SyntaxError" in capsys.readouterr().err


# Stopping and going on.


def test_it_stops_at_the_fault_and_tells_the_way_there(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(FAULTY)
    assert cli.main(["run", str(script)]) == 1
    captured = capsys.readouterr()
    assert "went on" not in captured.out
    assert "Traceback" not in captured.err
    assert captured.out.startswith("\n-Inf in the tensor was born in aten.log.default (log(0)) at train.py:6")
    assert "  calls train.py:9 -> train.py:6\n" in captured.out


@pytest.mark.parametrize("level", ["aten", "function"])
def test_report_goes_on_and_tells_at_the_end(
    level: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--level", level, "--on-nonfinite", "report", str(write(FAULTY))]) == 1
    out = capsys.readouterr().out
    assert out.index("went on -inf") < out.index("was born in")
    assert "train.py:6" in out


@needs_forward_lines
def test_a_fault_in_the_backward_pass_stops_there(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write("""
        import torch
        w = torch.zeros(3, requires_grad=True)
        loss = torch.sqrt(w).sum()
        loss.backward()
        print("went on")
    """)
    assert cli.main(["run", str(script)]) == 1
    out = capsys.readouterr().out
    assert "went on" not in out
    assert "train.py:4  [backward]" in out
    assert "  calls train.py:5\n" in out


def test_a_swallowed_fault_is_told_at_the_end(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write("""
        import torch
        for step in range(3):
            try:
                torch.log(torch.zeros(3) - step)
            except Exception:
                continue
        print("went on")
    """)
    assert cli.main(["run", str(script)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("went on\n\n-Inf in the tensor was born in aten.log.default")
    assert "the program caught the NonFiniteError" in out


def test_modules_have_names_and_can_be_saved_whole(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = write("""
        import torch
        from torch import nn

        class Square(nn.Module):
            def forward(self, x):
                return x * x

        class Trainer:
            def __init__(self):
                self.network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Square()))
                nn.init.constant_(self.network[1][0].bias, 3e38)

            def step(self):
                self.network[0](torch.ones(1, 2))  # a part on its own first
                return self.network(torch.ones(1, 2))

        trainer = Trainer()
        loss = trainer.step()
        torch.save(trainer.network, __file__ + ".pt")
    """)
    assert cli.main(["run", "--on-nonfinite", "report", str(script)]) == 1
    out = capsys.readouterr().out
    assert "at network.1.1, " in out
    assert Path(f"{script}.pt").exists()


@needs_eager_compiled
@pytest.mark.parametrize("level", ["aten", "function"])
def test_a_compiled_module_is_no_trouble(level: str, write: Write) -> None:
    script = write("""
        import torch
        from torch import nn

        class Square(nn.Module):
            def forward(self, x):
                return x * x

        model = torch.compile(nn.Sequential(nn.Linear(2, 2), Square()), backend="eager")
        model(torch.ones(1, 2))
        y = model(torch.full((1, 2), 1e38))
        print("no NaN" if y.isfinite().all() else "overflow")
    """)
    # Dynamo itself warns of `.grad` under any function mode, which -W error makes an error of.
    warn = "error" if level == "aten" else "default"
    done = command("run", "--level", level, "--on-nonfinite", "report", script, warn=warn)
    assert "hooks" not in done.stderr
    assert done.stdout.startswith("overflow\n")
    assert done.returncode == 1
    assert "train.py:7" in done.stdout


def test_a_fault_in_a_worker_is_told_by_the_worker(write: Write, tmp_path: Path) -> None:
    script = write("""
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Scaled(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                x = torch.arange(3.0) * index
                return x / x.sum()

        for batch in DataLoader(Scaled(), num_workers=1, multiprocessing_context="fork"):
            pass
    """)
    done = command("run", "--html", tmp_path / "page.html", script)
    assert done.returncode == 1
    assert "NaN in the tensor was born in aten.div.Tensor (0 / 0) at train.py:11" in done.stdout
    assert "another process" in done.stdout


@pytest.fixture
def default_device() -> Iterator[None]:
    """A default device is a mode that stays."""
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
def test_many_steps_keep_memory_bounded_and_a_default_device_is_fine(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write("""
        import gc, torch
        torch.set_default_device("cpu")
        from torch import nn
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        def records():
            gc.collect()
            return sum(type(thing).__name__ == "Record" for thing in gc.get_objects())
        for step in range(60):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step == 20:
                before = records()
        print("records", records() - before)
    """)
    for level in ("function", "aten"):
        assert cli.main(["run", "--level", level, str(script)]) == 0
        more = int(re.findall(r"records (-?\d+)", capsys.readouterr().out)[0])
        assert more < 1200, level  # the links of four steps


# The debugger, the keyboard, the terminal.


def test_pdb_opens_in_the_users_frame(write: Write) -> None:
    done = command("run", "--pdb", write(FAULTY), stdin=None, input="p x.shape\np __name__\nw\nq\n")
    assert done.returncode == 1, done.stderr
    assert "was born in aten.log.default" in done.stdout
    debugger = done.stdout.split("(Pdb)", 1)
    assert "train.py(6)main()" in debugger[0]
    assert "torch.Size([3])" in debugger[1]
    assert "'__main__'" in debugger[1]
    assert "sherlorch" not in debugger[1]


def test_an_interrupt_gives_the_report_so_far(write: Write) -> None:
    script = write("""
        import sys, time, torch
        y = torch.log(torch.zeros(3))
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    """)
    arguments = [sys.executable, "-m", "sherlorch", "run", "--on-nonfinite", "report", str(script)]
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored in a shell's background job
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert error == ""
    assert out.startswith("\nInterrupted. What was seen so far:\n\n-Inf in the tensor was born in")


def test_a_terminal_gets_a_progress_line_and_colour(write: Write) -> None:
    script = write("""
        import time, torch
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for step in range(3):
            parameter.sum().backward()
            optimizer.step()
            time.sleep(0.7)
            print("step", step)
        torch.zeros(1) / 0
    """)
    shown = on_a_terminal("run", script)
    assert re.search(r"sherlorch: \d+ ops, \d+/s, 1 optimizer step\b", shown)
    assert re.search(r"\r\x1b\[2Kstep 1\r?\n", shown)  # the line made way
    assert "\x1b[" in shown.split("step 2")[1]
    assert "NaN" in shown.split("step 2")[1]


def on_a_terminal(*arguments: object) -> str:
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "sherlorch", *map(str, arguments)],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ready, _, _ = select.select([ours], [], [], 1)
        try:
            part = os.read(ours, 65536) if ready else b""
        except OSError:  # closed at the other end
            break
        shown += part
        if not part and process.poll() is not None:
            break
    os.close(ours)
    assert process.wait(timeout=60) == 1
    return shown.decode()


# Wrong usage.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], "cannot read the script `missing.py`: No such file or directory"),
        (["."], "`.` is a directory"),
        (["-m", "no_such_module_here"], "there is no module `no_such_module_here`"),
        (["-m", "json.no_such_part"], "there is no module `json.no_such_part`"),
        (["-m", "xml"], "`xml` is a package without a __main__ module"),
        (["--pdb", "--on-nonfinite", "report", "x.py"], "--pdb stops at the first fault"),
        (["--html", "out", "--json", "./out", "x.py"], "--html and --json both write `out`"),
        (["--html", "no/such/place.html", "x.py"], "there is no directory `no/such`"),
        (["--json", ".", "x.py"], "--json `.` is a directory"),
    ],
)
def test_wrong_usage_is_one_clear_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sherlorch run: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--level", "gpu", "x.py"], ["--unknown", "x.py"]])
def test_unknown_options_are_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["run", *arguments])
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith("usage: sherlorch")
