"""Run the benchmarks one after the other, each in a process of its own: ``python -m benchmarks [names] [--quick]``."""

from __future__ import annotations

import argparse
import subprocess
import sys

# In the order of their names in docs/performance.md; wide rows are the throughput benchmark again.
RUNS = {
    "throughput": ["throughput"],
    "throughput_wide": ["throughput", "--rows=20000", "--row-bytes=20000", "--kind=binary", "--batch=64"],
    "first_batch": ["first_batch"],
    "restart": ["restart"],
    "epoch_boundary": ["epoch_boundary"],
    "epoch_boundary_in_training": ["epoch_boundary", "--step-ms=20"],
    "planning": ["planning"],
    "memory": ["memory"],
    "window_overhead": ["window_overhead"],
    "interference": ["interference"],
    "scaling": ["scaling"],
}
# Small enough to see within minutes that everything runs; the numbers mean nothing.
QUICK = {
    "throughput": ["--rows=20000", "--repeats=1", "--limit-s=1"],
    "throughput_wide": ["--rows=2000", "--repeats=1", "--limit-s=1"],
    "first_batch": ["--rows=20000", "--repeats=1"],
    "restart": ["--rows=20000", "--repeats=1", "--batch=480"],
    "epoch_boundary": ["--rows=20000", "--repeats=1", "--batch=480"],
    "epoch_boundary_in_training": ["--rows=20000", "--repeats=1", "--batch=480"],
    "planning": ["--sizes", "100000", "--repeats=1"],
    "memory": ["--sizes", "20000"],
    "window_overhead": ["--rows=20000", "--repeats=1"],
    "interference": ["--rows=20000", "--repeats=1"],
    "scaling": ["--rows=20000", "--repeats=1", "--ranks", "1", "2", "--reader-cpus", "1"],
}


def main() -> int:
    """Run what was asked for; returns the number of benchmarks that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"what to run, all by default: {', '.join(RUNS)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see that everything runs")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(RUNS))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(RUNS)}")
    failed = []
    for name in args.names or RUNS:
        module, *options = RUNS[name]
        command = [sys.executable, "-m", f"benchmarks.{module}", *options, *(QUICK[name] if args.quick else [])]
        print(f"\n## {name}\n\n`{' '.join(['python', *command[1:]])}`\n", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
