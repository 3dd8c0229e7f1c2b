"""How do several processes train one run? As workers that torchrun starts, that wait for each other and fail together.

Every worker holds the whole model and takes its share of each batch; PyTorch's DistributedDataParallel averages the
gradients, so that all of them apply the same update. Only the first worker writes files and prints.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loopscope.errors import UserError

_MAX_WAIT = timedelta(days=1)
"""How long a worker waits for the others: the first may draw data or validate. torchrun notices a dead worker."""


@dataclass(frozen=True)
class Workers:
    """Describe the processes that train a run, as one of them sees them; a single worker needs no communication."""

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this worker writes files and prints."""
        return self.rank == 0

    def share(self, rows: int) -> int:
        """The rows of a batch for each worker; equal shares, so that the mean over workers is the batch's."""
        if rows % self.count:
            raise UserError(
                f"A batch of {rows} rows does not divide among {self.count} workers; change training.batch_size, or "
                "torchrun's --nproc-per-node."
            )
        return rows // self.count

    def replicated(self, module: nn.Module, some_unused: bool = False) -> nn.Module:
        """The module with gradients averaged over workers; `some_unused`: a step may leave some parameters unused."""
        if self.count == 1:
            return module
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=some_unused)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a value over all workers."""
        if self.count == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.count

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait for all workers at the end of the block; an error in one of them ends all, with the same message."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        messages = ["" if failed is None else str(failed) or type(failed).__name__] * self.count
        if self.count > 1:
            dist.all_gather_object(messages, messages[0])
        for message in filter(None, messages):
            raise failed or UserError(message)


SINGLE_WORKER = Workers()


def shared_device(name: str) -> str:
    """The device that `auto` means for several workers: each its own CUDA device, or the CPU."""
    if name != "auto" or _launched_processes() == 1:
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _launched_processes() -> int:
    """The number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


@contextmanager
def join_workers(device: str) -> Iterator[Workers]:
    """Join the workers that torchrun started, on `cpu` or each on its own CUDA device; without torchrun, one worker.

    The process leaves the group at the end, and after an error that all workers raise. After any other error, leaving
    could wait for workers that wait for this process; so the process ends without leaving, and torchrun ends the
    others.
    """
    count = _launched_processes()
    if count == 1:
        yield SINGLE_WORKER
        return
    cuda = device == "cuda" and torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_MAX_WAIT)
    workers = Workers(int(os.environ["RANK"]), count)
    try:
        with workers.together():
            needed, here = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
            if device not in ("cpu", "cuda") or (cuda and here < needed):
                raise UserError(
                    f"{needed} workers take --device cpu, or --device cuda with as many CUDA devices, not --device "
                    f"{device} with {here}; lower torchrun's --nproc-per-node, or use --device cpu."
                )
            if cuda:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        yield workers
    finally:
        if sys.exception() is None or isinstance(sys.exception(), UserError):
            dist.destroy_process_group()


def exit_worker(code: int) -> NoReturn:
    """End a finished worker process at once: threads of its group may outlive the interpreter and abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
