"""Starts runs as processes of their own, each with a session of its own, without importing everything for each anew.

Reads one order a line, {"run": settings} or {"resume": path}; answers with the process's number, and with its wait status
once it has ended.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from steppe.core.config.run import resolve_config
from steppe.training.resume import resume
from steppe.training.train import run_experiment


def obey(order):
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(0)
    os.environ.update(order.get("environ", {}))
    if "resume" in order:
        resume(order["resume"])
    else:
        run_experiment(resolve_config(("call", order["run"])))


def main():
    import steppe.runtimes.preload  # noqa: F401 - what every run of a child would import

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                obey(json.loads(line))
            except BaseException:  # noqa: BLE001 - told in the log; the host's own loop must not go on in the child
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
