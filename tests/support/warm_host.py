"""Runs `steppe` commands and Python scripts in forks of one process that has made the imports already.

A command takes 0.1 s instead of 0.8, a script that needs torch one instead of four. The host reads one order a line on standard input,
{"words", "environ", "cwd", "out", "err"}, and answers with the exit code. The child is what the executable would be: a process of its
own with its own environment, directory, output and signals.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from types import ModuleType


class WarmHost:
    """The host process, as a test holds it; `torch` has it imported beforehand."""

    def __init__(self, *, torch: bool = False) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.process = subprocess.Popen([sys.executable, __file__, *(["torch"] if torch else [])], **pipes)

    def run(self, words: list[str], environ: dict[str, str], cwd: Path, logs: Path) -> subprocess.CompletedProcess[str]:
        """Run `steppe WORDS…`, or `python WORDS…` where the first word is a script, to its end."""
        out, err = logs / "stdout", logs / "stderr"
        order = {"words": words, "environ": environ, "cwd": str(cwd), "out": str(out), "err": str(err)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        code = int(self.process.stdout.readline())
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

    def close(self) -> None:
        """End the host."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def obey(order: dict) -> None:
    """Become the process that the order describes, and run its command or script."""
    from steppe.cli.main import entry

    for number, path in ((1, order["out"]), (2, order["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["cwd"])
    if order["environ"].get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    words = order["words"]
    if words[0].endswith(".py"):
        sys.argv = words
        run_script(Path(words[0]))
    else:
        sys.argv = ["steppe", *words]
        entry()


def run_script(path: Path) -> None:
    """Run a script as the interpreter does: its directory comes first, and its names are those of `__main__`."""
    sys.path[0] = str(path.parent)
    main = ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    exec(compile(path.read_text(), path, "exec"), main.__dict__)


def child(order: dict) -> int:
    """Run an order; the exit code."""
    try:
        obey(order)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would: a traceback and 1
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Answer orders until standard input ends."""
    import gymnasium

    import steppe.cli.main
    import steppe.loops.main

    assert gymnasium
    if "torch" in sys.argv[1:]:
        import torch

        import steppe.agents.ppo  # noqa: F401

        torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            import atexit

            code = child(json.loads(line))
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
