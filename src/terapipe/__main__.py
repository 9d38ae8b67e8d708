"""``python -m terapipe``"""

from terapipe.cli import entry

entry()
