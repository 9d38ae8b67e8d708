"""``python -m terapipe``, which is what torchrun starts: ``torchrun ... -m terapipe train run.toml``."""

from terapipe.cli import entry

entry()
