"""Let the TT linears of a model work together: one bank of halves, one product for siblings, no wide hidden layer.

Dropout, which would then take a large part of a CPU's time, becomes a fast one.
"""

from torch import nn

from hf_comera.compress.siblings import CACHED, FUSED, attends_to_codes, feeds_forward, sibling_names
from hf_comera.modules import TTLinear
from hf_comera.modules.fast_dropout import quicken_dropout
from hf_comera.modules.halves_bank import HalvesBank
from hf_comera.modules.joined import JoinedProjections

__all__ = ["wire"]


def wire(model: nn.Module) -> None:
    """Connect the layers of ``model``; called again it starts afresh, with the layers that are there then."""
    quicken_dropout(model)
    bank = HalvesBank()
    for name, module in model.named_modules():
        if isinstance(module, TTLinear):
            module.join_bank(bank)
            module.joined = None
            module.is_wide = feeds_forward(name)
    for name, module in model.named_modules():
        for names in sibling_names(name):
            layers = [getattr(module, child, None) for child in names]
            trains = [layer for layer in layers if isinstance(layer, TTLinear)]
            if len(trains) == len(layers):
                group = _join(trains)
                if attends_to_codes(module) and len(layers) == 3:
                    _attend(group, module)
        fused = getattr(module, FUSED.get(type(module).__name__, ""), None)
        if isinstance(fused, TTLinear) and attends_to_codes(module):
            group = _join([fused])
            group.num_parts = 3
            _attend(group, module)


def _attend(group: JoinedProjections, module: nn.Module) -> None:
    group.attention, group.has_cache = module.config, type(module).__name__ in CACHED


def _join(layers: list[TTLinear]) -> JoinedProjections:
    group = JoinedProjections()
    for place, layer in enumerate(layers):
        layer.join(group, place)
    return group
