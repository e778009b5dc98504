"""``python -m dpis``."""

import sys

from dpis.app import main

sys.exit(main())
