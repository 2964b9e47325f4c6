"""Passes over fx graphs that insert, drop and run non-finite checks; imported as `sherlorch.passes`."""
