"""What reader processes import: as little as possible, because a run that is disturbed starts many of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
from lancedb.table import LanceTable

from lance_ray_stream.table import TableRef

READ_S = 0.2


class SoakTable(TableRef):
    """A table of slow reads; a process that reads from it is killed in mid-window where a file asks for that."""

    def open(self) -> LanceTable:
        """As ``TableRef.open``."""
        table = super().open()
        if "take_row_ids" not in vars(table):
            take_row_ids = table.take_row_ids

            def disturbed(ids: list[int]) -> object:
                if len(ids):
                    self._on_read()
                return take_row_ids(ids)

            vars(table)["take_row_ids"] = disturbed
        return table

    def _on_read(self) -> None:
        time.sleep(READ_S)
        for order in Path(self.uri).glob("kill_reader_*.wanted"):
            try:
                order.with_suffix(".done").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal may take a moment


def with_twice(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A transform: one row per row, one more column."""
    batch["twice"] = batch["id"] * 2
    return batch
