"""Workers of xdist that are forked from a server which has loaded pytest, not started anew for every nested run."""

import multiprocessing
import multiprocessing.resource_sharer
import os
import sys
from multiprocessing.reduction import DupFd
from pathlib import Path

# pytester unloads what a nested run loads; these stay.
import xdist.dsession
import xdist.remote  # noqa: F401 - as said
from execnet.gateway_base import Popen2IO
from execnet.gateway_io import popen_bootstrapline

METHOD = "forkserver"
POSSIBLE = METHOD in multiprocessing.get_all_start_methods()
if POSSIBLE:
    import multiprocessing.popen_forkserver  # to stay, as above: it knows where the server is

LIBRARIES = "_pytest.", "xdist.", "execnet."
OURS = [f"pytest_kvmock.{name}" for name in ("harness", "plugin.fixtures", "plugin.report", "plugin.verdict")]


class ForkedIO(Popen2IO):
    """In place of `execnet.gateway_io.Popen2IOMaster`."""

    def __init__(self, _args, execmodel):
        context = multiprocessing.get_context(METHOD)
        context.set_forkserver_preload([*OURS, *(name for name in sys.modules if name.startswith(LIBRARIES))])
        worker_in, to_worker = os.pipe()
        from_worker, worker_out = os.pipe()
        self.process = context.Process(
            target=work, args=(DupFd(worker_in), DupFd(worker_out), Path.cwd(), dict(os.environ))
        )
        self.process.start()
        os.close(worker_in)
        os.close(worker_out)
        super().__init__(os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb"), execmodel=execmodel)

    def wait(self):
        self.process.join()
        return self.process.exitcode

    def kill(self):
        self.process.kill()


def work(stdin, stdout, directory, environment):
    """In the worker: what `python -c` with execnet's line does in a new process."""
    os.dup2(stdin.detach(), 0)
    os.dup2(stdout.detach(), 1)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - to the end of the process
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = ["-c"]
    exec(popen_bootstrapline, {"__name__": "__main__"})
