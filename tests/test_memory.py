"""Memory that is free goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

FREED = """
import ctypes, sys
import pyarrow as pa
from lance_ray_stream.memory import release_memory

def resident_mib():
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[1]) * 4096 / 2**20

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
# Below the size that malloc maps by itself, and with a last one that is kept: the heap cannot shrink by itself.
parts = [libc.malloc(100_000) for _ in range(1_000)]
kept = libc.malloc(100_000)
for part in parts:
    ctypes.memset(part, 1, 100_000)
    libc.free(part)
arrow = pa.array(bytes(1) * 60_000_000 for _ in range(1))
del arrow
before = resident_mib()
release_memory()
print(before - resident_mib())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_free_memory_is_given_back():
    run = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True, timeout=60)
    assert float(run.stdout) > 60  # of 95 MiB in small parts and 57 in one
