"""One faulty call on its own: kept with its arguments, written to a file, read back, run again."""

from sherlorch.replay.call import Outcome, Repro, comes_back, run, state_of, take
from sherlorch.replay.file import load, save
from sherlorch.replay.text import describe

__all__ = ["Outcome", "Repro", "comes_back", "describe", "load", "run", "save", "state_of", "take"]
