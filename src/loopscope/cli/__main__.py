"""`python -m loopscope.cli` is `loopscope`."""

import sys

from loopscope.cli import main

sys.exit(main())
