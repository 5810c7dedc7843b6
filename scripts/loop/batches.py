"""Which rows form a batch, by the number of the batch; and shares of a data set, by a hash of the content.

The order of an epoch is a pure function of seed and epoch, so a resumed run sees exactly what an uninterrupted one
would have seen.
"""

import hashlib
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

_ORDER = 2  # its stream of random numbers; those of masks are 0 and 1


def bucket(content: str) -> int:
    """A number from 0 to 99 that depends on nothing but the content."""
    return int.from_bytes(hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=8).digest(), "big") % 100


class EpochBatches(torch.utils.data.Dataset, ABC):
    """The training batches of one process; rows of like length share a batch, so that little is padded.

    Each epoch leaves out the few rows, always others, that do not fill a round of batches.

    Args:
        lengths: Tokens of each row.
        batch_size: Rows a batch.
        seed: Decides the order.
        process: Index of this process and number of all; together they share out each round of batches.

    Raises:
        ValueError: If there are not enough rows for one batch in each process.
    """

    def __init__(self, lengths: np.ndarray, *, batch_size: int, seed: int, process: tuple[int, int] = (0, 1)) -> None:
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.process_index, self.num_processes = process
        self.round_size = batch_size * self.num_processes
        self.batches_per_epoch = len(lengths) // self.round_size
        if not self.batches_per_epoch:
            raise ValueError(
                f"There are {len(lengths)} training sequences, but one batch takes {batch_size} in each of "
                f"{self.num_processes} processes. Use --per_device_train_batch_size "
                f"{max(1, len(lengths) // self.num_processes)} or less, or more data."
            )
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        epoch, place = divmod(number, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.lengths, self.round_size, self.seed, epoch)
        return self.make(self._order[place, self.process_index :: self.num_processes], number)

    @abstractmethod
    def make(self, chosen: np.ndarray, number: int) -> dict[str, Tensor]:
        """The batch with this number, made of the rows ``chosen``."""


def epoch_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Row numbers of an epoch, one batch a row: shuffled, like lengths together, the odd rest left out."""
    random = np.random.default_rng([seed, _ORDER, epoch])
    order = random.permutation(len(lengths))
    order = order[: len(order) - len(order) % batch_size]
    pool = 32 * batch_size
    pools = [order[i : i + pool] for i in range(0, len(order), pool)]
    order = np.concatenate([rows[np.argsort(lengths[rows], kind="stable")] for rows in pools])
    return random.permutation(order.reshape(-1, batch_size))
