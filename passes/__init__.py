"""Passes over fx graphs that insert, drop and remove non-finite checks; imported as `sherlorch.passes`."""

from sherlorch.passes.compiling import Backend, CompiledChecks, compile, compiled_checks
from sherlorch.passes.drop import drop_checks
from sherlorch.passes.flags import return_flags
from sherlorch.passes.insert import insert_checks
from sherlorch.passes.instrumenting import instrument
from sherlorch.passes.remove import remove_checks

__all__ = [
    "Backend",
    "CompiledChecks",
    "compile",
    "compiled_checks",
    "drop_checks",
    "insert_checks",
    "instrument",
    "remove_checks",
    "return_flags",
]
