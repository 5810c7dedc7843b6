"""The ways in which users have torch make float32 products of less, and all that torch tells of them."""

import torch


def set_generic(value):
    torch.backends.fp32_precision = value


def set_products(value):
    torch.backends.cuda.matmul.fp32_precision = value


def set_cudnn(value):
    torch.backends.cudnn.fp32_precision = value


def set_cpu(value):
    torch.backends.mkldnn.matmul.fp32_precision = value


def set_legacy(value):
    torch.set_float32_matmul_precision(value)


def allow(value):
    torch.backends.cuda.matmul.allow_tf32 = value


SETTINGS = {
    "none": [],
    "all tf32": [(set_generic, "tf32")],
    "all bf16": [(set_generic, "bf16")],
    "all exact": [(set_generic, "ieee")],
    "CUDA products tf32": [(set_products, "tf32")],
    "CUDA products tf32 against all": [(set_generic, "ieee"), (set_products, "tf32")],
    "both tf32": [(set_generic, "tf32"), (set_products, "tf32")],
    "cuDNN tf32": [(set_cudnn, "tf32")],
    "all and cuDNN tf32": [(set_generic, "tf32"), (set_cudnn, "tf32")],
    "CPU products bf16": [(set_cpu, "bf16")],
    "CPU products tf32": [(set_cpu, "tf32")],
    "legacy highest": [(set_legacy, "highest")],
    "legacy high": [(set_legacy, "high")],
    "legacy medium": [(set_legacy, "medium")],
    "legacy allow_tf32": [(allow, True)],
    "legacy, then all": [(set_legacy, "high"), (set_generic, "tf32")],
}


def choose(name):
    for setter, value in SETTINGS[name]:
        setter(value)


def told():
    """Every setting of torch, and what it comes to after those above it are set to something else."""
    backends = torch.backends
    places = (backends, backends.cudnn, backends.cuda.matmul, backends.mkldnn, backends.mkldnn.matmul)
    found = [[place.fp32_precision for place in places], legacy()]
    for place in (backends, backends.cudnn):
        kept = place.fp32_precision
        for value in ("ieee", "tf32"):
            place.fp32_precision = value
            found.append([each.fp32_precision for each in places])
        place.fp32_precision = kept if place is backends or kept != backends.fp32_precision else "none"
    return found


def legacy():
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "torch raises"
