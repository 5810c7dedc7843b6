"""Which blocks go where: puts them into a compressed model, and takes them out again."""

from torch import nn

from hf_comera.modules.block import Block, exchange_class, restore_class
from hf_comera.modules.fast_dropout import disable_fast_dropout, enable_fast_dropout
from hf_comera.modules.halves_cache import HalvesCache
from hf_comera.modules.latent_attention import attention_block
from hf_comera.modules.tiled_mlp import mlp_block
from hf_comera.modules.tt_linear import TTLinear

__all__ = ["block_of", "fuse", "unfuse"]


def block_of(module: nn.Module) -> type[Block] | None:
    """The block that serves ``module``, or None."""
    return attention_block(module) or mlp_block(module)


def fuse(model: nn.Module) -> None:
    """Let the TT linears of ``model`` work together: blocks, one cache of halves, dropout that is fast on a CPU.

    Called again it starts afresh, with the layers that are there then.
    """
    unfuse(model)
    enable_fast_dropout(model)
    cache = HalvesCache()
    for module in list(model.modules()):
        if isinstance(module, TTLinear):
            module.join_cache(cache)
        elif (block := block_of(module)) is not None and any(isinstance(part, TTLinear) for part in module.modules()):
            exchange_class(module, block)


def unfuse(model: nn.Module) -> None:
    """Undo :func:`fuse`."""
    disable_fast_dropout(model)
    for module in model.modules():
        restore_class(module)
