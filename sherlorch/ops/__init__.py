"""The laws of operations: which results inherit their state, and which are bounded."""

from sherlorch.ops.law import Group, Law
from sherlorch.ops.lookup import law_of_call, law_of_function, law_of_name, law_of_overload
from sherlorch.ops.table import GROUPS

__all__ = [
    "GROUPS",
    "Group",
    "Law",
    "law_of_call",
    "law_of_function",
    "law_of_name",
    "law_of_overload",
]
