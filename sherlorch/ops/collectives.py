"""Which arguments a collective of torch.distributed writes, and what of this process goes into them."""

from __future__ import annotations

from typing import Any, NamedTuple

# How the values of this process go into what is written.
MIXES = "mixes"  # into each part of it
PLACES = "places"  # into the part that has this process's rank
ROOT = "root"  # only where this process is the root
NOWHERE = "nowhere"  # another process sent it
RETURNS = "returns"  # into the result, which is new memory
WRAPS = "wraps"  # the result is the same memory, still on its way


class Collective(NamedTuple):
    """What is known of one collective: the names of the arguments that it writes and reads."""

    how: str
    writes: str = ""
    reads: str = ""


# Functions of torch.distributed, as level "function" sees them.
FUNCTIONS = {
    "all_reduce": Collective(MIXES, "tensor", "tensor"),
    "all_reduce_coalesced": Collective(MIXES, "tensors", "tensors"),
    "reduce": Collective(MIXES, "tensor", "tensor"),
    "broadcast": Collective(ROOT, "tensor", "tensor"),
    "all_gather": Collective(PLACES, "tensor_list", "tensor"),
    "all_gather_coalesced": Collective(MIXES, "output_tensor_lists", "input_tensor_list"),
    "all_gather_into_tensor": Collective(MIXES, "output_tensor", "input_tensor"),
    "all_gather_single": Collective(MIXES, "output_tensor", "input_tensor"),
    "_all_gather_base": Collective(MIXES, "output_tensor", "input_tensor"),
    "gather": Collective(PLACES, "gather_list", "tensor"),
    "scatter": Collective(ROOT, "tensor", "scatter_list"),
    "reduce_scatter": Collective(MIXES, "output", "input_list"),
    "reduce_scatter_tensor": Collective(MIXES, "output", "input"),
    "reduce_scatter_single": Collective(MIXES, "output", "input"),
    "_reduce_scatter_base": Collective(MIXES, "output", "input"),
    "all_to_all": Collective(PLACES, "output_tensor_list", "input_tensor_list"),
    "all_to_all_single": Collective(MIXES, "output", "input"),
    "recv": Collective(NOWHERE, "tensor"),
    "irecv": Collective(NOWHERE, "tensor"),
}

# Operators of the namespace c10d, which level "aten" sees; their schemas do not mark what they write.
OPERATORS = {
    "allreduce_": Collective(MIXES, "tensors", "tensors"),
    "allreduce_coalesced_": Collective(MIXES, "tensors", "tensors"),
    "reduce_": Collective(MIXES, "tensors", "tensors"),
    "broadcast_": Collective(ROOT, "tensors", "tensors"),
    "allgather_": Collective(PLACES, "output_tensors", "input_tensors"),
    "allgather_coalesced_": Collective(MIXES, "output_lists", "input_list"),
    "allgather_into_tensor_coalesced_": Collective(MIXES, "outputs", "inputs"),
    "_allgather_base_": Collective(MIXES, "output_tensor", "input_tensor"),
    "gather_": Collective(PLACES, "output_tensors", "input_tensors"),
    "scatter_": Collective(ROOT, "output_tensors", "input_tensors"),
    "reduce_scatter_": Collective(MIXES, "output_tensors", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": Collective(MIXES, "outputs", "inputs"),
    "_reduce_scatter_base_": Collective(MIXES, "output_tensor", "input_tensor"),
    "alltoall_": Collective(PLACES, "output_tensors", "input_tensors"),
    "alltoall_base_": Collective(MIXES, "output", "input"),
    "recv_": Collective(NOWHERE, "tensors"),
    "recv_any_source_": Collective(NOWHERE, "tensors"),
}

# What they are called in a report.
NAMES = frozenset(name.rstrip("_") for name in (*FUNCTIONS, *OPERATORS)) | {
    *("all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "all_gather_into_tensor_out"),
}

_FUNCTIONAL = ("_c10d_functional::", "_c10d_functional_autograd::")


def collective_of(func: Any) -> Collective | None:
    """The row of a function of torch.distributed, or of an operator or its overload; None for all others."""
    if getattr(func, "__module__", "") == "torch.distributed.distributed_c10d":
        return FUNCTIONS.get(getattr(func, "__name__", ""))
    schema = getattr(func, "_schema", None)
    name: str = schema.name if schema is not None else getattr(func, "_qualified_op_name", "")
    if name.startswith("c10d::"):
        return OPERATORS.get(name[6:])
    if not isinstance(name, str) or not name.startswith(_FUNCTIONAL) or "wait_tensor" in name:
        return None
    return Collective(WRAPS if "wrap" in name else RETURNS)
