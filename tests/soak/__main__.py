"""Nodes join and leave, readers, workers and the planner are killed, while a run trains on 1 to 8 workers.

Then all that its workers received is compared with the plan of an undisturbed run: every row exactly once an epoch
relative to the checkpoints, every batch of every rank the planned one, also those that were done again. The exit
status is 1 if there is a difference, or if not all of it happened in time.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from lance_ray_stream import SplitLayout
from tests.soak import run, verdict
from tests.soak.schedule import make_schedule
from tests.tables import make_table


def main() -> int:
    """Parse, run, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of what happens, and in which order (default: 0)")
    parser.add_argument("--seconds", type=int, default=1200, help="when to give up (default: 1200)")
    parser.add_argument(
        "--times", type=int, default=6, help="nodes join, and leave; all else in proportion (default: 6)"
    )
    parser.add_argument(
        "--even", action="store_true", help="only numbers of workers that divide the splits: no 5, no 7"
    )
    args = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"  # steps take milliseconds: look more often
    os.environ.setdefault("RAY_worker_niceness", "0")  # or a busy machine runs everything else first
    warnings.filterwarnings("ignore", message="lancedb fork support")
    faulthandler.dump_traceback_later(args.seconds + 60, exit=True)  # whatever hangs; the nodes end with this process
    with tempfile.TemporaryDirectory(prefix="soak", ignore_cleanup_errors=True) as folder:
        return soak(Path(folder), args)


def soak(out: Path, args: argparse.Namespace) -> int:
    """One run in ``out``."""
    schedule = make_schedule(args.seed, times=args.times)
    print(f"places for workers: {schedule.places()}; {len(schedule.events)} things happen\n", flush=True)
    make_table(out, run.ROWS, columns=["id"])
    begun = time.monotonic()
    disturbed = run.Soak(out, uneven=not args.even, end=begun + args.seconds)
    failure = None
    try:
        disturbed.run(schedule)
    except Exception:
        failure = traceback.format_exc(limit=4)
    seconds = time.monotonic() - begun
    attempts = verdict.attempts_of(run.lines_of(out, "run"))
    num_epochs = max((attempt.last_step for attempt in attempts), default=-1) // run.STEPS_PER_EPOCH + 1
    num_steps = num_epochs * run.STEPS_PER_EPOCH
    problems = verdict.problems(
        attempts,
        planned=run.planned_batches(out),
        splits_of=SplitLayout(run.NUM_SPLITS, uneven=not args.even).splits_of,
        num_steps=num_steps,
        steps_per_epoch=run.STEPS_PER_EPOCH,
    )
    report(attempts, disturbed.happened, num_steps)
    print(f"\n{seconds:.0f} s, seed {args.seed}, {os.cpu_count()} CPUs")
    for problem in [*problems[: verdict.MAX_PROBLEMS], *([failure] if failure else [])]:
        print(f"WRONG: {problem}")
    if problems or failure:
        print(f"FAILED: {len(problems)} differences{', and not all of it happened' if failure else ''}")
        return 1
    print(f"PASSED: every row exactly once in each of {num_epochs} epochs, every batch of every rank the planned one")
    return 0


def report(attempts: list[verdict.Attempt], happened: list[dict[str, Any]], num_steps: int) -> None:
    """How it went: one line for each start of the workers, then the counts."""
    because = {event["attempt"]: event for event in happened if "attempt" in event}
    rows, again = [], 0
    for number, (attempt, end) in enumerate(zip(attempts, verdict.ends(attempts, num_steps), strict=True)):
        redone = attempt.last_step + 1 - end
        again += redone
        event = because.get(attempt.start, {"kind": "(ended by what came next)", "restart_s": "", "waited": {}})
        waited = " + ".join(f"{seconds:.1f}" for seconds in event["waited"].values())
        steps = f"{attempt.first_step}..{attempt.last_step}"
        rows.append([number, event["kind"], attempt.world, steps, redone, event["restart_s"], waited])
    header = ["start", "after", "workers", "steps", "done again", "restart, s", "of it stream + state + first batch, s"]
    print("\n" + verdict.table(header, rows))
    counts = Counter(event["kind"] for event in happened)
    print("\n" + ", ".join(f"{count} x {kind}" for kind, count in counts.items()))
    print(f"world sizes {sorted({attempt.world for attempt in attempts})}; {num_steps} steps, {again} done again")
    restarts = [event for event in happened[1:] if "attempt" in event]
    if restarts:
        whole = statistics.median(event["restart_s"] for event in restarts)
        data = statistics.median(sum(event["waited"].values()) for event in restarts)
        print(
            f"from what happened to the first step after it, {len(restarts)} restarts, median: {whole:.1f} s, of it "
            f"{data:.1f} s waiting for data"
        )


if __name__ == "__main__":
    sys.exit(main())
