"""A long elastic run on a cluster in which something goes wrong all the time: ``python -m tests.soak --help``."""
