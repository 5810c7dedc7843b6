"""Matrix products as sizes: what each multiplies, reads and writes, its gradients, the time a machine needs for it."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from hf_comera.tt.machine import Machine

__all__ = ["Cost", "Product", "predicted_seconds", "total_cost"]


class Product(NamedTuple):
    """One matrix product ``(m, k) @ (k, n)``."""

    stage: Literal["parts", "matrix", "apply"]
    """Cores to parts; halves to the dense matrix; anything with the input."""
    name: str
    m: int
    k: int
    n: int
    dtype: torch.dtype
    copied: int = 0
    """Entries that are copied into another order besides."""

    def gradients(self) -> tuple["Product", "Product"]:
        """The products that give the gradients of the two operands."""
        first = self._replace(name=f"{self.name}: d first", k=self.n, n=self.k)
        return first, self._replace(name=f"{self.name}: d second", m=self.k, k=self.m, copied=0)


class Cost(NamedTuple):
    """What some products add up to."""

    multiplications: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.bytes_read + self.bytes_written


def total_cost(products: Iterable[Product]) -> Cost:
    """Exact multiplications and bytes, every operand read once and every result written once.

    >>> total_cost([Product("apply", "code", 2, 3, 5, torch.float32)])
    Cost(multiplications=30, bytes_read=84, bytes_written=40)
    """
    multiplications = num_read = num_written = 0
    for product in products:
        m, k, n, itemsize = product.m, product.k, product.n, product.dtype.itemsize
        multiplications += m * k * n
        num_read += (m * k + k * n + product.copied) * itemsize
        num_written += (m * n + product.copied) * itemsize
    return Cost(multiplications, num_read, num_written)


def predicted_seconds(product: Product, machine: Machine, training: bool) -> float:
    """Seconds of one product with the overhead of the call, in training with those of its gradients."""
    m, k, n, itemsize = product.m, product.k, product.n, product.dtype.itemsize
    ceilings = machine.of(product.dtype)
    copies = 2 * product.copied * itemsize / ceilings.bandwidth
    seconds = ceilings.seconds(m, k, n) + machine.fresh_seconds(m * n * itemsize) + copies + ceilings.overhead
    if training:
        seconds += ceilings.seconds(m, n, k) + machine.fresh_seconds(m * k * itemsize)
        seconds += ceilings.seconds(k, m, n) + machine.fresh_seconds(k * n * itemsize)
        seconds += copies + ceilings.gradient_overhead
    return seconds
