"""Processes: start a function or a module on several ranks, and write jobs for clusters."""

from terapipe.launch.job import Launch
from terapipe.launch.processes import keep_memory, launch, take_cores

__all__ = ["Launch", "keep_memory", "launch", "take_cores"]
