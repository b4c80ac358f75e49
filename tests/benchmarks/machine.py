"""The machine that numbers belong to."""

from __future__ import annotations

import os
import platform
import sqlite3
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

_PARTS_A_CALL = 1024  # the system takes no more
LIBRARIES = ("ray", "torch", "torchrl", "tensordict", "sqlalchemy", "safetensors", "blake3", "numpy")


def describe(scratch: Path) -> dict[str, Any]:
    """Return what the machine is, and how fast its memory and the disk under `scratch` are right now."""
    scratch.mkdir(parents=True, exist_ok=True)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gb": round(_meminfo("MemTotal") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "libraries": {name: _version(name) for name in LIBRARIES},
        "file_system": file_system(scratch),
        "write_fdatasync_gb_s": round(_disk_rate(scratch), 2),
        "memcpy_gb_s": round(_copy_rate(), 2),
        "load_average": round(os.getloadavg()[0], 2),
    }


def free_memory() -> int:
    """Return the bytes that can be had without swapping."""
    return _meminfo("MemAvailable")


def file_system(path: Path) -> str:
    """Return the type of the file system that a path lies on."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, where, kind, *_ = line.split(" ")
        inside = where == "/" or f"{path.resolve()}/".startswith(f"{where}/")
        if inside and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]


def write_durably(path: Path, parts: Iterable[np.ndarray[Any, Any]]) -> None:
    """Write a new file and make its bytes durable: the least that any durable publish has to do."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        left = [part.reshape(-1).view(np.uint8).data for part in parts]
        while left:
            done = os.writev(fd, left[:_PARTS_A_CALL])
            while left and done >= left[0].nbytes:
                done -= left.pop(0).nbytes
            if left:
                left[0] = left[0][done:]
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _disk_rate(scratch: Path, nbytes: int = 128 << 20) -> float:
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    rates = []
    for index in range(3):
        path = scratch / f"rate-{os.getpid()}-{index}"
        began = time.perf_counter()
        write_durably(path, [data])
        rates.append(nbytes / (time.perf_counter() - began) / 1e9)
        path.unlink()
    return median(rates)


def _copy_rate(nbytes: int = 128 << 20) -> float:
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        rates.append(nbytes / (time.perf_counter() - began) / 1e9)
    return median(rates)


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/meminfo has no {name}")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
