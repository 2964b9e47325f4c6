"""Each example, run as a user runs it, blames the line that its source marks as the culprit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from needs import has_torch

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

VERDICTS = {
    "compiled_model.py": (
        "NaN in `model.centers.grad` began as Inf in aten.div.Tensor at {line}  [backward]"
    ),
    "backward_only_nan.py": (
        "NaN in `encoder.0.weight.grad` was born in aten.div.Tensor at {line}  [backward]"
    ),
    "find_nan_in_transformer.py": (
        "NaN in `loss` began as -Inf in aten.log.default (log(0)) at {line}  [forward]"
    ),
    "guarded_training.py": (
        "NaN in `loss` was born in aten.div.Tensor (0 / 0) at model.0, {line}  [forward]"
    ),
    "half_precision_overflow.py": (
        "NaN and Inf in `y` began as Inf in mul (394.8 * -235.1) at {line}  [forward]"
    ),
    "inplace_through_view.py": "NaN in `loss` was born in div_ (0 / 0) at {line}  [forward]",
    "poisoned_parameter.py": (
        "Inf in `loss` came in with parameter model.scale, first used at {line}  [forward]"
    ),
}


# The compiler of torch imports what torch itself has deprecated; so does `torch.load` of 2.0.
WARNINGS = ("-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore:TypedStorage is deprecated")
if sys.version_info[:3] == (3, 13, 0):  # where Dynamo warns of that Python
    WARNINGS += ("-W", "ignore:Guards may run slower on Python 3.13.0")
NEEDS = {
    "backward_only_nan.py": ("2.1", "backward kernels know their forward op"),
    "compiled_model.py": ("2.4", "compiled checks"),
    "half_precision_overflow.py": ("2.4", "a kernel of this dtype on the CPU"),
}


def output(example: Path) -> str:
    done = subprocess.run(
        [sys.executable, *WARNINGS, str(example.relative_to(ROOT))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    stderr = done.stderr.replace("No CUDA runtime is found, using CUDA_HOME='/usr/local'\n", "")  # torch 2.4
    assert (done.returncode, stderr) == (0, "")
    return done.stdout


def marked_line(example: Path) -> int:
    lines = example.read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if line.endswith("# <- culprit"))
    return number


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_report_names_the_marked_line(example: Path) -> None:
    needed, what = NEEDS.get(example.name, ("2.0", ""))
    if not has_torch(needed):
        pytest.skip(f"{what}: torch {needed}")
    verdict = VERDICTS[example.name].format(line=f"{example.name}:{marked_line(example)}")
    assert verdict in output(example).splitlines()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 60


def refreshed(readme: str) -> str:
    """The README with each quoted output replaced by what its example prints now."""
    quoted = re.compile(r"(<!-- output of: python (\S+) -->\n```text\n).*?(?=```)", flags=re.DOTALL)
    text, count = quoted.subn(lambda match: match[1] + output(ROOT / match[2]), readme)
    assert count == 1
    return text


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the README shows torch 2.13")
def test_the_readme_shows_what_the_example_prints() -> None:
    readme = README.read_text(encoding="utf-8")
    assert refreshed(readme) == readme, "write it anew: python tests/test_examples.py"


def test_another_output_is_noticed() -> None:
    readme = "<!-- output of: python examples/inplace_through_view.py -->\n```text\nNo non-finite\n```\n"
    assert "NaN in `loss` was born in div_" in refreshed(readme)


if __name__ == "__main__":
    README.write_text(refreshed(README.read_text(encoding="utf-8")), encoding="utf-8")
