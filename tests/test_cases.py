"""Real NaN and Inf bugs with their right answers: `cases/README.md` says how each is scored."""

import importlib.util
from pathlib import Path

import pytest
import torch
from needs import has_torch, skip_compiled, skip_unseen_assignments

import sherlorch

FILES = sorted((Path(__file__).parent / "cases").glob("[0-9]*.py"))

# Key words of each case's mechanism; one of each group must stand in the printed reason or remedy.
REASONS = {
    "001": [("overflow",), ("exp(140)",), ("clamp", "expm1")],
    "002": [("sqrt'(0)",), ("0 / 0",), ("inside the root", "where()")],
    "004": [("derivative of a / b",), ("0 / 0",), ("before dividing",)],
    "006": [("sqrt'(0)",), ("deviation from the mean",), ("inside the root",)],
    "007": [("sqrt'(0)",), ("0 / 0",), ("vector_norm",)],
    "009": [("sqrt'(0)",), ("0 / 0",), ("after the root does not help",)],
    "012": [("angle",), ("re**2 + im**2",), ("0 * inf",), ("magnitude",)],
    "013": [("x ** 0.5 at x = 0 is infinite",), ("0 * inf",), ("clamp_min", "clip")],
    "015": [("0 / 0",), ("product of the other factors",), ("division-free",)],
    "017": [("singular",), ("log(0) = -inf",)],
    "018": [("logsumexp",), ("-inf - (-inf)",), ("finfo", "most negative finite")],
    "019": [("prefix",), ("overflow",), ("0 * inf",)],
    "021": [("kl_div",), ("0 / 0",), ("log_target",)],
    "023": [("already inf",), ("0 * inf",), ("before the computation",)],
    "025": [("0 / 0",), ("before dividing", "non-zero")],
    "026": [("exploding gradient",), ("exceeds the float32 range",), ("clip",)],
    "028": [("log(0) = -inf",), ("0 * inf",), ("binary_cross_entropy_with_logits",)],
    "029": [("mean of an empty tensor",), ("0 / 0",)],
    "031": [("negative",), ("fractional power",)],
    "033": [("alignment",), ("longer than the input",), ("zero_infinity",)],
    "034": [("label smoothing",), ("-inf of masked classes",), ("finite",)],
    "036": [("negative base",), ("fractional",), ("clamp",)],
    "038": [("half precision",), ("65504",), ("autocast",)],
    "039": [("half precision",), ("65504",), ("float32",)],
    "041": [("rounds to zero in float16",), ("rsqrt(0) = inf",), ("0 * inf",)],
    "043": [("log(0) = -inf",), ("log(1) is 0",), ("clamp",)],
    "044": [("log(0) = -inf",), ("exactly zero",)],
    "046": [("exp(100) overflows",), ("expm1",)],
    "048": [("0 / 0",), ("underflow", "zero")],
    "049": [("softplus",), ("underflows",), ("log(0) = -inf",)],
    "051": [("0 / 0",), ("peak",), ("clamp_min",)],
    "053": [("one element",), ("undefined",)],
    "054": [("one element",), ("0 / 0",), ("drop_last", "batch")],
    "056": [("0 * (-inf) = NaN",), ("masked_fill", "where")],
    "058": [("fully masked row",), ("-inf",), ("finfo",)],
    "059": [("min + min",), ("bfloat16",), ("booleans",)],
    "061": [("0 / 0",), ("norm is zero",), ("F.normalize",)],
    "063": [("epsilon",), ("float16",), ("1e-4",)],
    "065": [("0 / 0",), ("epsilon",)],
    "067": [("5000 ** 2",), ("largest float16",), ("float32",)],
    "068": [("sqrt'(0) is infinite",), ("0 * inf",)],
    "069": [("half precision",), ("running_mean",)],
    "071": [("uninitialised memory",), ("init",)],
    "073": [("already -inf",), ("before the computation",)],
    "074": [("contains NaN",), ("mask",)],
    "076": [("0 / 0",), ("deviation is zero",), ("clamp_min",)],
    "078": [("half precision",), ("float32",)],
    "080": [("atanh(1) is infinite",), ("clamp",)],
    "082": [("log(0) = -inf",), ("epsilon",)],
    "083": [("sqrt'(0)",), ("0 / 0",), ("where()",)],
    "084": [("0 / 0",), ("norm is zero",)],
    "093": [("repeated eigenvalues",), ("0 / 0",), ("jitter",)],
    "094": [("softmax underflowed",), ("log_softmax",)],
    "096": [("0 / 0",), ("norm is zero",)],
    "097": [("renormalisation",), ("sum to 0",), ("mask the logits",)],
}


def load(path):
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def marked_lines(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return {number for number, line in enumerate(lines, start=1) if "# <- " in line}


def base_names(op_name):
    base = op_name.split(".")[1] if op_name.startswith("aten.") else op_name
    plain = base if base.startswith("__") else base.rstrip("_")
    return {base, plain, plain.lstrip("_")}


def fits(culprit, expected):
    if expected["phase"] == "input":
        return culprit.origin in ("outside", "uninitialised")
    return culprit.phase == expected["phase"] and not base_names(culprit.op_name).isdisjoint(expected["ops"])


def bad_tensors(results):
    return [value for value in results.values() if not torch.isfinite(value.detach()).all()]


def diagnose_first(tracker, results):
    """The first non-finite result that the level saw; at function level gradients are not seen."""
    for tensor in bad_tensors(results):
        try:
            return tracker.diagnose(tensor)
        except sherlorch.UntracedTensorError:
            assert tracker.level == "function"
    return tracker.diagnose()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["aten", "function"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_case(path, level):
    case = load(path)
    expect = case.EXPECT
    if level == "function" and expect["phase"] == "backward":
        pytest.skip("the function level does not see the backward pass")
    _skip_for_old_torch(path.stem[:3], level)
    with sherlorch.trace(level=level) as tracker:
        results = case.run()
    if expect["phase"] == "none":
        assert not bad_tensors(results)
        for tensor in results.values():
            if level == "aten" or not _is_gradient(tensor, tracker):
                assert tracker.diagnose(tensor).ok
        return
    report = diagnose_first(tracker, results)
    assert not report.ok
    culprit = report.culprits[0]
    if culprit.phase == "backward" and not has_torch("2.1"):  # which does not tell the forward op
        assert (culprit.location, culprit.forward) == (None, None)
        return
    assert int(culprit.location.rpartition(":")[2]) in marked_lines(path), str(report)
    assert any(fits(culprit, answer) for answer in [expect, *expect.get("also", [])]), str(report)
    assert not tracker.diagnose().coverage.unseen


def _skip_for_old_torch(case, level):
    if case == "031":
        skip_unseen_assignments(level)
    if case == "082":
        skip_compiled()
    if case == "071" and not has_torch("2.4"):
        pytest.skip("memory that was never written is filled with NaN: torch 2.4")
    if case == "006" and level == "why" and not has_torch("2.1"):
        pytest.skip("backward kernels know their forward op: torch 2.1")


def _is_gradient(tensor, tracker):
    try:
        tracker.node(tensor)
    except sherlorch.UntracedTensorError as error:
        return "aten" in str(error)
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", [p for p in FILES if p.stem[:3] in REASONS], ids=lambda path: path.stem)
def test_reason_is_the_mechanism(path):
    _skip_for_old_torch(path.stem[:3], "why")
    case = load(path)
    with sherlorch.trace(level="aten") as tracker:
        results = case.run()
    report = tracker.diagnose(bad_tensors(results)[0])
    explanation = report.explanations[report.culprits[0].seq]
    said = f"{explanation.why} {explanation.remedy}"
    for group in REASONS[path.stem[:3]]:
        assert any(word in said for word in group), f"none of {group} in: {said}"
    assert max(map(len, str(report).splitlines())) <= 100


def test_every_case_with_a_fault_has_a_reason():
    faulty = {path.stem[:3] for path in FILES if load(path).EXPECT["phase"] != "none"}
    assert faulty == set(REASONS)
    assert len(FILES) == 59
