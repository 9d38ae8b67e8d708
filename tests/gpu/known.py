"""Tests of other suites that fail on pretend GPUs, and why. Each is to be fixed, or is about CPUs by its nature."""

KNOWN: dict[str, str] = {}
