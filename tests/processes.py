"""Python programs in processes of their own, which do not each import torch and transformers anew.

A server imports them once and forks for every program, which then sees the modules of ``IMPORTED`` and nothing else:
no hf_comera, no tensors, no threads. A program that must see them imported anew, since it sets what they read at their
import, is started with ``subprocess`` instead.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTED = ("torch", "transformers.modeling_utils", "transformers.trainer", "datasets", "peft")


def run(
    *command: str | Path, cwd: str | Path = ROOT, environment: dict[str, str] | None = None, workers: int = 0
) -> subprocess.CompletedProcess:
    """What ``python *command`` printed, and its status, as ``subprocess.run`` returns them.

    Args:
        command: ``-m`` and a module, ``-c`` and a program, or a script, with arguments.
        cwd: The folder it runs in, and where modules are looked for first, as in every Python process.
        environment: All of it; ``None`` is that of this process.
        workers: So many processes of one data-parallel run, as ``torchrun --nproc_per_node`` starts them; the status
            is the first that is not zero.
    """
    command = [str(word) for word in command]
    environment = dict(os.environ if environment is None else environment)
    ranks = [{}]
    if workers:
        from torch.distributed import TCPStore

        # As torchrun does: the store of this process takes a free port, so that no other process comes in between.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": workers,
            "LOCAL_WORLD_SIZE": workers,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(workers)]
    with tempfile.TemporaryDirectory() as folder:
        out, error = Path(folder, "out"), Path(folder, "error")
        status = _Server.current().ask({
            "command": command,
            "cwd": str(cwd),
            "environments": [environment | {name: str(value) for name, value in rank.items()} for rank in ranks],
            "outputs": [str(out), str(error)],
        })  # fmt: skip
        return subprocess.CompletedProcess(command, status, out.read_text("utf-8"), error.read_text("utf-8"))


class _Server:
    """The process that forks."""

    _current = None

    @classmethod
    def current(cls):
        if cls._current is None:
            cls._current = cls()
            atexit.register(cls._current.stop)
        return cls._current

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": ""},  # each program has its own
            start_new_session=True,
        )

    def ask(self, request):
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except BaseException:  # the time limit of a test, for one: the next program gets another server
            self.stop()
            type(self)._current = None
            raise

    def stop(self):
        """With all that it has forked."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def _serve():
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        forked = set()
        for environment in request["environments"]:
            if (child := os.fork()) == 0:
                _become(request, environment)
                return
            forked.add(child)
        print(_first_status(forked), flush=True)


def _first_status(forked):
    """Of the processes, of which one that fails ends the others."""
    failed = 0
    while forked:
        child, status = os.wait()
        forked.remove(child)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for other in forked:
                os.kill(other, signal.SIGKILL)
    return failed


def _become(request, environment):
    """Run the program as ``python`` does; its exceptions are those of the process."""
    for stream, path in enumerate(request["outputs"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(environment)
    way, *rest = request["command"]
    sys.path[:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if way == "-m":
        name, *arguments = rest
        sys.path.insert(0, request["cwd"])
        sys.argv = [name, *arguments]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif way == "-c":
        program, *arguments = rest
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [way, *rest]
        sys.path.insert(0, str(Path(way).parent))
        runpy.run_path(way, run_name="__main__")


if __name__ == "__main__":
    _serve()
