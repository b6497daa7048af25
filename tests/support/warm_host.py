"""Runs `steppe` commands and Python scripts in forks of one process that has made the imports already.

A command takes 0.1 s instead of 0.8, a script that needs torch one instead of four. The host reads one order a line on standard input
and answers with one line. {"words", "environ", "cwd", "out", "err"} starts a child and is answered with its process id; {"end_of": pid}
waits for its end and {"state_of": pid} does not: both are answered with the exit code, or with nothing while it runs. The child is what
the executable would be: a process of its own with its own session, environment, directory, output and signals.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import ModuleType


class Forked:
    """A child that is under way, with what tests use of `subprocess.Popen`."""

    def __init__(self, host: WarmHost, pid: int, out: Path, err: Path) -> None:
        self.host, self.pid, self.out, self.err = host, pid, out, err
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None and (answer := self.host.ask({"state_of": self.pid})):
            self.returncode = int(answer)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.02)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; its output and what it wrote to standard error."""
        self.wait(timeout)
        return self.out.read_text(), self.err.read_text()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class WarmHost:
    """The host process, as a test holds it; `torch` or `service` has that imported beforehand."""

    def __init__(self, *, torch: bool = False, service: bool = False) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        more = [name for name, wanted in (("torch", torch), ("service", service)) if wanted]
        self.process = subprocess.Popen([sys.executable, __file__, *more], **pipes)

    def run(self, words: list[str], environ: dict[str, str], cwd: Path, logs: Path) -> subprocess.CompletedProcess[str]:
        """Run `steppe WORDS…`, or `python WORDS…` where the first word is a script, to its end."""
        child = self.start(words, environ, cwd, logs)
        code = int(self.ask({"end_of": child.pid}))
        return subprocess.CompletedProcess(words, code, child.out.read_text(), child.err.read_text())

    def start(self, words: list[str], environ: dict[str, str], cwd: Path, logs: Path) -> Forked:
        """The same, beside whatever comes next; who starts it waits for its end."""
        out, err = logs / "stdout", logs / "stderr"
        order = {"words": words, "environ": environ, "cwd": str(cwd), "out": str(out), "err": str(err)}
        return Forked(self, int(self.ask(order)), out, err)

    def ask(self, order: dict[str, object]) -> str:
        """Send an order; the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        return self.process.stdout.readline().strip()

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
    import steppe.training.train

    assert gymnasium
    if "torch" in sys.argv[1:]:
        import torch

        import steppe.algorithms.ppo.ppo

        torch.set_num_threads(1)
    if "service" in sys.argv[1:]:
        import steppe.control.http.server  # noqa: F401
    for line in sys.stdin:
        order = json.loads(line)
        if "words" in order:
            print(fork(order), flush=True)
        else:
            print(exit_code(order), flush=True)


def fork(order: dict) -> int:
    """Start a child that runs the order; its process id."""
    pid = os.fork()
    if pid == 0:
        import atexit

        os.setsid()
        code = child(order)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return pid


def exit_code(order: dict) -> int | str:
    """Of the child that is asked about; empty while it runs."""
    if "end_of" in order:
        return os.waitstatus_to_exitcode(os.waitpid(order["end_of"], 0)[1])
    pid, status = os.waitpid(order["state_of"], os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else ""


if __name__ == "__main__":
    main()
