"""A stand-in for `experiments.main` that tests of the sweep start, without a model or JAX.

Its seed says what it does: 1 fails until the file `mended` lies beside its folder, 2 is killed, 3
waits for ever with a child of its own; all others write what a finished run leaves.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--config.seed", type=int, default=0, dest="seed")
    given, _ = parser.parse_known_args()
    with open(given.workdir / "starts.txt", "a") as file:
        file.write(f"{os.getpid()}\n")
    print("under way")
    if given.seed == 1 and not (given.workdir.parent / "mended").exists():
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise ValueError("no such reward\nsecond line") from error
    if given.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if given.seed == 3:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (given.workdir / "waiting").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    (given.workdir / "DONE").write_text(json.dumps({"steps": 2}))


if __name__ == "__main__":
    main()
