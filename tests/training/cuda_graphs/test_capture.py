"""training/cuda_graphs/capture.py: recorded functions do their work at each replay, from memory that is kept."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import dropout

from hf_comera.modules import TTLinear
from hf_comera.training.cuda_graphs.capture import CaptureWatch, CudaCapture


def test_tensors_from_outside_are_kept_and_those_made_within_are_not():
    table, x = torch.arange(3), torch.ones(3, requires_grad=True)
    watch = CaptureWatch()
    with watch:
        y = x[table] * 2
        y.sum().backward()
    within = weakref.ref(y)
    places = {tensor.data_ptr() for tensor in watch.tensors()}
    assert {table.data_ptr(), x.data_ptr()} <= places
    assert y.data_ptr() not in places
    address = table.data_ptr()
    del y, table
    gc.collect()
    assert within() is None
    assert address in {tensor.data_ptr() for tensor in watch.tensors()}
    assert not any(tensor.requires_grad for tensor in watch.tensors())


@pytest.mark.parametrize("read", [lambda x: x.item(), bool, lambda x: [1, 2][x.long()]], ids=["item", "bool", "index"])
def test_no_value_is_read_on_the_host(read):
    with pytest.raises(RuntimeError, match="reads a value of a tensor on the host"), CaptureWatch():
        read(torch.rand(()))


WAITING = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask": lambda x: x[x > 0],
    "mask and index": lambda x: x.view(2, 2)[torch.tensor([True, False]), torch.tensor([1])],
    "write by mask": lambda x: x.index_put_((x > 0,), torch.ones(1).expand(4)),
    "gradient of mask": lambda x: torch.ops.aten.index_put(x, [x > 0], x[:1].expand(4), True),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "bincount": lambda x: x.long().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("select", WAITING.values(), ids=WAITING)
def test_no_size_depends_on_values(select):
    message = r"(selects by a boolean mask|whose size depends on values) \(aten\..*\), for which the host waits"
    with pytest.raises(RuntimeError, match=message), CaptureWatch():
        select(torch.ones(4))


@pytest.mark.parametrize("compare", [torch.equal, torch.allclose, lambda x, y: torch.linalg.cholesky(x @ y)])
def test_no_host_waits_for_a_comparison(compare):
    with pytest.raises(RuntimeError, match=r"reads a value of a tensor on the host \(aten\..*\)"), CaptureWatch():
        compare(torch.eye(3), torch.eye(3))


@pytest.mark.parametrize(
    "copy",
    [
        lambda there: there.copy_(torch.ones(3)),
        lambda there: torch.ones(3).to(there.device),
        lambda there: there.cpu(),
    ],
    ids=["copy_", "to the device", "to the host"],
)
def test_no_host_waits_for_a_copy(copy):
    there = torch.ones(3, device="meta")  # not the host, as far as the watch is concerned
    with pytest.raises(RuntimeError, match=r"waits for a copy between host and device \(aten\..*\)"), CaptureWatch():
        copy(there)


HELD = {
    "index": lambda x: x[torch.tensor([1, 1, 0])],
    "number by mask": lambda x: x.index_put_((x > 0,), torch.tensor(2.0)),
    "masked_fill": lambda x: x.masked_fill(x > 0, 2.0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "known size": lambda x: x.repeat_interleave(x.long(), output_size=4),
    "number": lambda x: torch.empty((), device="meta").copy_(torch.tensor(1.0)),
    "copy": lambda x: x.to(torch.float64).copy_(x),
    "copy in order": lambda x: torch.empty(4, device="meta").copy_(x, non_blocking=True),
}


@pytest.mark.parametrize("use", HELD.values(), ids=HELD)
def test_what_a_graph_holds_is_not_refused(use):
    with CaptureWatch():
        use(torch.ones(4))


def test_a_cpu_has_no_graphs():
    assert "is on 'cpu'" in CudaCapture.why_not(torch.device("cpu"))
    assert CudaCapture.why_not(torch.device("cuda", 0)) is None


@pytest.fixture
def events(monkeypatch):
    """What is done with graphs and streams, as if there were a GPU."""
    events = []

    class Graph:
        def register_generator_state(self, generator):
            events.append((self, generator))

    @contextmanager
    def recording(graph, **settings):
        events.append((graph, "begins"))  # here torch registers the generator of the device by itself
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "that before")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: events.append((None, stream)))
    return events


def test_own_generators_are_registered_with_each_graph_before_it_records(events):
    generators = [torch.Generator(), torch.Generator()]
    capture = CudaCapture(torch.device("cuda", 0), generators)
    for _ in range(2):
        events.clear()
        capture.record(lambda: events.append((None, "runs")))
        assert [event for _, event in events] == [*generators, "begins", "runs", "that before"]
        assert len({graph for graph, _ in events[:-2]}) == 1


def test_a_recording_that_cuda_ends_leaves_the_stream_as_it_was(events):
    def fail():
        raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError, match="previous error during capture"):
        CudaCapture(torch.device("cuda", 0)).record(fail)
    assert events[-1] == (None, "that before")


@pytest.mark.gpu
def test_replays_on_a_gpu_read_and_write_the_same_memory():
    x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")

    def double():
        y.copy_(2 * x)

    capture = CudaCapture(x.device)
    capture.warm_up(double)
    replay = capture.record(double)
    for value in (1, 5):
        x.fill_(value)
        replay()
        assert y.tolist() == [2 * value] * 4
    del replay
    capture.forget()
    capture.record(double)()


@pytest.mark.gpu
def test_random_numbers_on_a_gpu_are_new_in_each_replay_and_those_of_the_seed():
    x, y = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")

    def drop():
        y.copy_(dropout(x))

    capture = CudaCapture(x.device)
    capture.warm_up(drop)
    replay = capture.record(drop)
    draws = []
    torch.cuda.manual_seed(0)
    for _ in range(2):
        replay()
        draws.append(y.clone())
    assert not torch.equal(*draws)
    torch.cuda.manual_seed(0)
    for expected in draws:
        drop()
        assert torch.equal(y, expected)


@pytest.mark.gpu
def test_own_generators_on_a_gpu_draw_anew_in_each_replay_and_what_their_seed_says():
    y, generators = torch.zeros(1000, device="cuda"), [torch.Generator("cuda") for _ in range(2)]

    def draw():
        y.copy_(sum(torch.rand(1000, device="cuda", generator=generator) for generator in generators))

    def seed():
        for number, generator in enumerate(generators):
            generator.manual_seed(number)

    capture = CudaCapture(y.device, generators)
    capture.warm_up(draw)
    replay = capture.record(draw)
    draws = []
    seed()
    for _ in range(2):
        replay()
        draws.append(y.clone())
    assert not torch.equal(*draws)
    seed()
    for expected in draws:
        draw()
        assert torch.equal(y, expected)


@pytest.mark.gpu
def test_a_host_read_on_a_gpu_raises_and_leaves_the_device_usable():
    x = torch.ones(4, device="cuda")
    capture = CudaCapture(x.device)
    with pytest.raises(RuntimeError):
        capture.record(lambda: x.sum().item())
    assert x.sum().item() == 4


@pytest.mark.gpu
def test_layers_in_graphs_on_a_gpu_build_their_halves_at_each_replay():
    layer, x = TTLinear(12, 20, ranks=4).cuda().requires_grad_(False), torch.randn(4, 12, device="cuda")
    outputs = [torch.zeros(4, 20, device="cuda") for _ in range(2)]
    capture = CudaCapture(x.device)
    replays = []
    for output in outputs:
        capture.warm_up(lambda: layer(x))
        replays.append(capture.record(lambda output=output: output.copy_(layer(x))))
    layer.core_0.data.mul_(2)
    for output, replay in zip(outputs, replays, strict=True):
        replay()
        torch.testing.assert_close(output, torch.nn.functional.linear(x, layer.dense(), layer.bias))
