"""What every test starts from: no network, no files of the user, one torch thread, fixed seeds, devices at hand."""

import os
import random
import socket
import tempfile

# Before anything imports transformers or huggingface_hub: both read these once, and so do subprocesses of the tests.
HF_HOME = tempfile.TemporaryDirectory(prefix="hf_comera-tests-")
os.environ |= {
    "HF_HOME": HF_HOME.name,
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _exact_products():
    """Whatever the test before has left float32 products to be made of, all settings are those of a new process."""
    torch.set_float32_matmul_precision("highest")
    backends = torch.backends
    for setting in (backends, backends.cudnn, backends.cuda.matmul, backends.mkldnn.matmul):
        setting.fp32_precision = "none"


@pytest.fixture(autouse=True)
def _no_precision_of_others(monkeypatch):
    """Training arguments of a test before may have left theirs to every Accelerator of the process."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


@pytest.fixture(autouse=True)
def _loopback_only(request, monkeypatch):
    """A test that reaches past this machine fails at once, whatever library it goes through."""
    if request.node.get_closest_marker("network"):
        return
    connect = socket.socket.connect

    def connect_to_loopback(sock, address):
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise RuntimeError(f"a test tried to connect to {address}; tests stay on this machine")
        return connect(sock, address)

    monkeypatch.setattr(socket.socket, "connect", connect_to_loopback)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Every device a test can be run on; the CUDA half is marked ``gpu``."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.fail("this test was asked for with -m gpu, but torch finds no CUDA device")
    return torch.device(request.param)
