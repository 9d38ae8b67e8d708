"""Python runs this first where its folder is on PYTHONPATH: in the command itself and in every process it starts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # where ``tests`` is

from tests import pretend

if pretend.is_active():
    from tests.pretend import activation

    activation.activate()
