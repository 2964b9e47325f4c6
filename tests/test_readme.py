"""Each line of the README's section on what is seen has tests behind it, and what it owns up to is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from needs import needs_torch

import sherlorch

TESTS = Path(__file__).parent
README = (TESTS.parent / "README.md").read_text(encoding="utf-8")
TITLE = "## What it sees and what it does not"

# The beginning of each line, and the tests that hold it.
PROOFS: dict[str, tuple[str, ...]] = {
    "every torch operation of the block's thread": (
        "test_every_operator_runs_as_untraced_and_its_nodes_tell_the_truth",
        "test_results_are_as_untraced_and_nodes_tell_the_truth",
        "test_each_thread_sees_its_own",
    ),
    "the lists that `_foreach_*` and `_fused_*` optimizers write": (
        "test_optimizers_element_by_element",
        "test_function_level_sees_every_kind_of_optimizer_step",
        "test_running_statistics_of_batch_norm",
    ),
    'at level `"aten"` every backward kernel': (
        "test_backward_nodes_know_their_forward",
        "test_double_backward_goes_back_to_the_first_forward",
    ),
    "recomputation under checkpointing": ("test_checkpointing_has_a_phase",),
    "writes through views": (
        "test_every_node_tells_the_truth_after_each_step",
        "test_whatever_holds_a_planted_fault_names_it",
    ),
    "tensors that were bad before the block": (
        "test_a_bad_parameter_is_called_by_its_name",
        "test_a_bad_batch_is_called_by_its_line",
    ),
    "memory of `empty`": ("test_memory_that_is_read_before_it_is_written",),
    "sparse, nested, complex": (
        "test_results_are_as_untraced_and_nodes_tell_the_truth",
        "test_strided_nested_tensors",
        "test_derivatives_of_functions",
        "test_forward_mode_and_its_zeros_without_memory",
        "test_distributed_tensor",
    ),
    "what another process sent": (
        "test_what_another_process_sent_came_in_at_the_collective",
        "test_what_is_on_its_way_is_not_judged_before_it_was_waited_for",
    ),
    "no result, no gradient": (
        "test_no_result_and_no_random_number_changes",
        "test_results_gradients_and_random_numbers_stay_the_same",
    ),
    "no mode of yours": ("test_another_mode_sees_what_it_sees_untraced",),
    "no tensor lives longer": (
        "test_tensors_die_when_they_would_have_died",
        "test_no_tensor_is_kept_alive",
        "test_memory_is_flat_over_steps",
    ),
    "no hook and no mode stays behind": (
        "test_no_hook_and_no_mode_is_left_behind",
        "test_an_exception_comes_out_as_untraced_and_nothing_stays",
    ),
    "what it could not record": (
        "test_a_failure_while_recording_is_counted_and_told",
        "test_a_fault_of_the_recorder_is_counted_and_the_program_goes_on",
    ),
    'at level `"function"`, backward kernels': (
        "test_a_gradient_at_function_level_says_which_level_sees_it",
    ),
    'at level `"function"`, the insides': ("test_at_function_level_a_composite_function_is_one_operation",),
    "the inside of one kernel": ("test_a_kernel_is_one_operation", "test_a_custom_operator_is_one_operation"),
    "another thread, unless it traces itself": (
        "test_a_thread_without_a_tracer_is_named",
        "test_threads_that_are_traced_themselves_are_not_named",
    ),
    "another process: the report says": ("test_a_gradient_from_another_process",),
    "writes by NumPy or C++": (
        "test_memory_that_numpy_wrote_is_read_again",
        "test_a_write_behind_the_back_is_found_where_it_is_asked_for",
    ),
    "a compiled function at work": ("test_what_is_compiled_inside_runs_traced_without_a_word",),
    "what a subclass wraps": ("test_another_mode_sees_what_it_sees_untraced",),
    "values that are finite and wrong": ("test_a_finite_value_is_never_wrong",),
    "a GPU, so far": ("test_late_states_tell_the_same", "test_many_looks_are_read_at_once"),
}


def lines(readme: str) -> list[str]:
    """The items of the section's lists, each on one line."""
    section = readme.split(TITLE + "\n")[1].split("\n## ")[0]
    return [" ".join(item.split()) for item in re.findall(r"^- (.+(?:\n  .+)*)", section, flags=re.MULTILINE)]


def check(readme: str, proofs: dict[str, tuple[str, ...]], tests: set[str]) -> None:
    """Every line has its entry and every entry its line, in this order; every test exists."""
    found = lines(readme)
    for line, beginning in zip(found, proofs):
        assert line.startswith(beginning), f"no entry for {line!r}, or in another place than {beginning!r}"
    assert len(found) == len(proofs)
    for beginning, names in proofs.items():
        assert names, f"nothing proves {beginning!r}"
        assert tests.issuperset(names), f"{beginning!r} names tests that do not exist"


def test_each_line_of_the_readme_has_its_tests() -> None:
    tests = {
        name
        for path in TESTS.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert len(lines(README)) > 20
    check(README, PROOFS, tests)


@pytest.mark.parametrize(
    ("items", "proofs"),
    [
        ("- one;\n- two.", {"one": ("test_it",)}),
        ("- one.", {"one": ("test_it",), "two": ("test_it",)}),
        ("- two;\n- one.", {"one": ("test_it",), "two": ("test_it",)}),
        ("- one.", {"one": ("test_that_is_not_there",)}),
        ("- one.", {"one": ()}),
    ],
)
def test_a_line_without_a_test_is_found(items: str, proofs: dict[str, tuple[str, ...]]) -> None:
    check(f"{TITLE}\n\n- one.\n\n## Next\n- other", {"one": ("test_it",)}, {"test_it"})
    with pytest.raises(AssertionError):
        check(f"{TITLE}\n\n{items}\n\n## Next", proofs, {"test_it"})


# What it does not see.


def ops_of(tracker: sherlorch.ProvenanceTracker) -> list[str]:
    return [node.op_name for node in tracker.nodes if node.op_name != "leaf"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_at_function_level_a_composite_function_is_one_operation() -> None:
    logits, target = torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    with sherlorch.trace(level="function") as tracker:
        F.cross_entropy(logits, target)
    assert ops_of(tracker) == ["cross_entropy"]
    with sherlorch.trace(level="aten") as below:
        F.cross_entropy(logits, target)
    assert len(ops_of(below)) > 1
    with sherlorch.trace(level="function") as tracker:
        bad = torch.ones(2, 3) / 0
        made = torch.nested.nested_tensor([bad, torch.ones(1, 3)]) * 2
    assert tracker.diagnose(made).culprits[0].origin == "outside"


@needs_torch("2.1", "a kernel for attention on the CPU")
def test_a_kernel_is_one_operation() -> None:
    q = torch.full((1, 1, 2, 8), 1e30)
    with sherlorch.trace(level="aten") as tracker:
        out = F.scaled_dot_product_attention(q, q, q)
    (culprit,) = tracker.diagnose(out).culprits
    assert "scaled_dot_product" in culprit.op_name
    assert not any("softmax" in name for name in ops_of(tracker))


def test_a_custom_operator_is_one_operation() -> None:
    library = torch.library.Library("sherlorch_readme", "DEF")
    library.define("own(Tensor x) -> Tensor")
    library.impl("own", lambda x: torch.log(x - 1) * 2, "CPU")
    try:
        with sherlorch.trace(level="aten") as tracker:
            out = torch.ops.sherlorch_readme.own(torch.ones(3))
        assert tracker.diagnose(out).culprits[0].op_name == "sherlorch_readme.own.default"
        assert not any("log" in name for name in ops_of(tracker))
    finally:
        library._destroy() if hasattr(library, "_destroy") else None  # in torch 2.0 it ends with its object


def test_a_finite_value_is_never_wrong() -> None:
    with sherlorch.trace() as tracker:
        out = torch.full((3,), 1e38) - 1e38 + 1
    assert tracker.diagnose(out).ok
