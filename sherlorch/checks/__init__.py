"""What an inserted check does at run time, and how its answers become a report."""

from sherlorch.checks.module import Checks
from sherlorch.checks.site import Site, SiteFacts

__all__ = ["Checks", "Site", "SiteFacts"]
