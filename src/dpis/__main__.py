"""``python -m dpis``."""

import sys

from dpis.cli import main

sys.exit(main())
