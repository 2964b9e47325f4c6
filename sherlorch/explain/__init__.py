"""Why a fault is one, and what to write instead: a table of patterns, first match wins."""

from sherlorch.explain.fault import Explanation, Fault, Pattern
from sherlorch.explain.table import PATTERNS, explain, register

__all__ = ["PATTERNS", "Explanation", "Fault", "Pattern", "explain", "register"]
