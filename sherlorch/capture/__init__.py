"""Evidence of a faulty call, taken at the moment of the fault: the only time when its values are at hand."""

from sherlorch.capture.names import plain_name
from sherlorch.capture.taking import capture

__all__ = ["capture", "plain_name"]
