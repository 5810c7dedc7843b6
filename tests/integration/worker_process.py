"""How one process of a data-parallel test ends."""

import os
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist


def run_worker(main: Callable[[], None], join: bool = True) -> None:
    """Run ``main`` in a process of its own, and end the process with it.

    Args:
        main: What the process does.
        join: Whether a process of several joins the others with gloo. Otherwise ``main`` does, as a Trainer does.
    """
    torch.set_num_threads(1)
    status = 0
    try:
        if join and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            dist.init_process_group("gloo")
        main()
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another one still talks to it
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end: threads of gloo outlive it now and then. One that then takes the lock of the
    # interpreter is ended by Python 3.11 within C++ code that forbids that: "terminate called without an active
    # exception", SIGABRT, after all work was done. To destroy the group is no cure: whatever still holds a part of it,
    # DDP or a mesh, keeps its threads, and the destructor of DDP may wait for that same lock for ever (torch 2.13).
    os._exit(status)
