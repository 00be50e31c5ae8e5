"""``python -m lance_ray_stream``: the command line, also where the script is not installed."""

import sys

from lance_ray_stream.cli import main

sys.exit(main())
