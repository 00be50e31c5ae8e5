"""Scikit-learn's handwritten digits as two LanceDB tables, one to train on and one to test with."""

from __future__ import annotations

import argparse
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.table import Table
from sklearn.datasets import load_digits

TRAIN_TABLE = "digits"
TEST_TABLE = "digits_test"
TRAIN_ROWS = 1440
TEST_ROWS = 357
PIXELS = 64  # 8 x 8

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("image", pa.list_(pa.float32(), PIXELS), nullable=False),  # row by row, 0 is white, 1 is ink
        pa.field("label", pa.int64(), nullable=False),
    ]
)


def write_digits(uri: str | Path, *, overwrite: bool = False) -> tuple[Table, Table]:
    """The two tables at ``uri``, written the first time and reused from then on.

    ``id`` is the row's place in scikit-learn's data set, the same in every run; no id is in both tables.

    Args:
        uri: a local folder or any other LanceDB URI.
        overwrite: write both tables anew. A table keeps its versions, so a stream that pins one can go on.

    Returns:
        The training table (1440 rows) and the test table (357 rows).
    """
    database = lancedb.connect(str(uri))
    if not overwrite and {TRAIN_TABLE, TEST_TABLE} <= set(database.list_tables().tables):
        return database.open_table(TRAIN_TABLE), database.open_table(TEST_TABLE)
    images, labels = load_digits(return_X_y=True)
    shuffled = np.random.default_rng(0).permutation(len(images))
    test_ids, train_ids = np.sort(shuffled[:TEST_ROWS]), np.sort(shuffled[TEST_ROWS:])
    tables = []
    for name, ids in ((TRAIN_TABLE, train_ids), (TEST_TABLE, test_ids)):
        pixels = pa.array((images[ids] / 16.0).astype(np.float32).reshape(-1))
        columns = [pa.array(ids), pa.FixedSizeListArray.from_arrays(pixels, PIXELS), pa.array(labels[ids])]
        data = pa.Table.from_arrays(columns, schema=SCHEMA)
        tables.append(database.create_table(name, data, mode="overwrite"))
    return tables[0], tables[1]


def main() -> None:
    """Write the tables, or say that they are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uri", nargs="?", default=".data/digits", help="folder or URI of the tables")
    parser.add_argument("--overwrite", action="store_true", help="write them anew")
    arguments = parser.parse_args()
    for table in write_digits(arguments.uri, overwrite=arguments.overwrite):
        print(f"{table.name}: {table.count_rows()} rows, version {table.version}")


if __name__ == "__main__":
    main()
