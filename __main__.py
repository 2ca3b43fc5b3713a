"""`python -m carom`."""

import sys

from .cli.main import main

sys.exit(main())
