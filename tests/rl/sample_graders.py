"""Graders, good and bad, that reward workers import in the tests."""

import ctypes
import os
import re
import subprocess
import sys
import time


def length(text, entry):
    return len(text) * entry.get("scale", 1)


def pid(text, entry):
    time.sleep(0.2)  # so that the other worker gets a request as well
    return os.getpid()


def naps(text, entry):
    """Returns when it began, seconds."""
    began = time.monotonic()
    time.sleep(0.05)
    return began


def pause(text, entry):
    time.sleep(0.6)
    return 1.0


def works(text, entry):
    """Works for 0.3 seconds of processor time; returns the seconds that took."""
    began, end = time.monotonic(), time.process_time() + 0.3
    while time.process_time() < end:
        pass
    return time.monotonic() - began


def first_to_die(text, entry):
    with open("/proc/self/oom_score_adj") as file:
        return int(file.read())


def heavy_modules(text, entry):
    return sum(name in sys.modules for name in ("jax", "transformers", "torch", "numpy"))


def prints_and_reads(text, entry):
    print("noise on standard output")
    return len(sys.stdin.read())


def raises(text, entry):
    raise KeyError("no such part")


def leaves(text, entry):
    sys.exit(3)


def dies(text, entry):
    ctypes.string_at(0)


def hangs(text, entry):
    time.sleep(1000)


def hangs_with_the_lock(text, entry):
    """Never gives another thread a turn, as a bad regular expression does."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def hangs_with_a_child(text, entry):
    child = subprocess.Popen(["sleep", "1000"])
    with open(entry["pid_file"], "w") as file:
        file.write(str(child.pid))
    time.sleep(1000)


def returns(text, entry):
    return {
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "text": "1.0",
        "list": [1.0],
        "complex": 1j,
        "huge": 10**400,
        "true": True,
        "int": 2,
    }[text]


def fails_on_some(text, entry):
    if sum(text.encode()) % 2:
        raise ValueError("odd")
    return float(len(text) > 1)


def parity(text, entry):
    """A reward that differs within every group and needs no skill."""
    return sum(text.encode()) % 2


def often_one(text, entry):
    """1 for most responses, so that many groups are all alike."""
    return float(sum(text.encode()) % 16 > 0)
