"""`python -m specctl` is `specctl`."""

from __future__ import annotations

import sys

from specctl.cli.main import main

sys.exit(main())
