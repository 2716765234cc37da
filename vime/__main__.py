"""`python -m vime`: the `vime` command."""

import sys

from vime.cli.main import main

sys.exit(main())
