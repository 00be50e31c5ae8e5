"""Benchmarks: each module is a script with ``--help``; ``python -m benchmarks`` runs them one after the other."""
