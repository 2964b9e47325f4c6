"""Watches training steps: costs next to nothing on a good one, explains a bad one."""

from sherlorch.guard.guard import Guard

__all__ = ["Guard"]
