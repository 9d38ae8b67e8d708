"""Tests of pretend GPUs, and of terapipe on them. Only `python -m tests.pretend` runs them: see tests/pretend."""

from tests import pretend

collect_ignore_glob = [] if pretend.is_active() else ["test_*.py"]
