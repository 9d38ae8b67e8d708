"""``python -m terapipe``"""

from terapipe.cli import main

raise SystemExit(main())
