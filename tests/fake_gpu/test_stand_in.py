"""The stand-in behaves as CUDA does where the package depends on it."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from support.fake_cuda import TO_DEVICE, TO_HOST, CUDAGraph, StandIn, stand_in

CUDA = torch.device("cuda", 0)


def test_tensors_say_that_they_are_on_the_device(fake: StandIn) -> None:
    tensor = torch.zeros(2, 3, device="cuda")

    assert tensor.device == CUDA
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert (tensor + 1).sum().device == CUDA
    assert torch.zeros(1, device="cuda:1").device == torch.device("cuda", 1)


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_tensors_of_two_devices_are_refused(fake: StandIn, other: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(2, device="cuda:0") + torch.zeros(2, device=other)


def test_numpy_is_refused(fake: StandIn) -> None:
    with pytest.raises(TypeError, match="can't convert"):
        torch.zeros(2, device="cuda").numpy()


def test_a_device_that_is_not_there_is_refused(fake: StandIn) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2, device="cuda:2")


def test_a_copy_to_the_device_is_no_view_of_the_host(fake: StandIn) -> None:
    host = torch.zeros(3)
    device = host.to(CUDA)
    host += 1

    assert device.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "index",
    [
        1,
        (0, slice(1, 3)),
        (..., 2),
        (None, slice(None, None, 2)),
        (slice(None), torch.tensor([2, 0])),
        (1, torch.tensor([True, False, True, True])),
    ],
    ids=str,
)
def test_indexing_is_that_of_torch(fake: StandIn, index: object) -> None:
    values = torch.arange(24).view(2, 4, 3) if index != (..., 2) else torch.arange(24).view(2, 3, 4)
    device = values.to(CUDA)

    assert device[index].cpu().equal(values[index])
    changed = values.clone()
    changed[index] = 7
    device[index] = 7
    assert device.cpu().equal(changed)


def test_a_number_divides_by_its_reciprocal(fake: StandIn) -> None:
    """As torch's kernel for CUDA: 5 * (1 / 49) is less than 5 / 49 rounded."""
    host = torch.arange(1.0, 50.0, dtype=torch.float64)
    divided = (host.to(CUDA) / 49).cpu()

    assert divided.equal(host * (1 / 49))
    assert not divided.equal(host / 49)
    assert host.to(CUDA).div_(49).cpu().equal(divided)


def test_copies_and_waits_are_counted(fake: StandIn) -> None:
    tensor = torch.zeros(5, dtype=torch.int16).to(CUDA)
    assert float(tensor.sum()) == 0.0
    tensor.cpu()

    ledger = fake.ledger
    assert (ledger.sizes[TO_DEVICE], ledger.sizes[TO_HOST], ledger.waits) == (10, 10, 3)
    assert ledger.floats_to_host == 0
    torch.zeros(5, device="cuda").cpu()
    assert (ledger.floats_to_host, ledger.waits) == (20, 4)
    tensor.nonzero()
    tensor[tensor > 0]
    assert ledger.waits == 6


def test_only_copies_to_pageable_memory_and_requested_waits_make_the_host_wait(
    fake: StandIn,
) -> None:
    tensor = torch.zeros(5).to(CUDA, non_blocking=True)
    pinned = torch.zeros(5).pin_memory()
    pinned.copy_(tensor, non_blocking=True)
    assert fake.ledger.waits == 0

    torch.zeros(5).copy_(tensor, non_blocking=True)
    assert fake.ledger.waits == 1
    torch.cuda.synchronize()
    assert fake.ledger.waits == 2


def test_operations_of_other_threads_are_counted(fake: StandIn) -> None:
    thread = threading.Thread(target=lambda: torch.ones(2, device="cuda").sum())
    thread.start()
    thread.join()

    assert fake.ledger.operations == 2


@pytest.mark.thorough
def test_memory_is_counted_and_limited() -> None:
    with stand_in(memory=1000) as fake:
        first = torch.zeros(200, device="cuda")
        assert fake.allocated == first[:5].clone().nbytes + 780 == 800
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(100, device="cuda")
        del first
        gc.collect()
        assert fake.allocated == 0
        assert fake.peak[0] == 820


def test_a_graph_replays_on_the_same_tensors(fake: StandIn) -> None:
    source = torch.ones(2, device="cuda")
    graph = CUDAGraph()
    with torch.cuda.graph(graph):
        result = (source * 2)[:1] + 1
    assert result.isnan().all()
    source.fill_(5)

    graph.replay()

    assert result.tolist() == [11]


def test_a_graph_refuses_waits_and_copies_of_the_host(fake: StandIn) -> None:
    source = torch.ones(2, device="cuda")
    with torch.cuda.graph(CUDAGraph()), pytest.raises(RuntimeError, match="capturing"):
        float(source[0])
    with torch.cuda.graph(CUDAGraph()), pytest.raises(RuntimeError, match="capturing"):
        source.copy_(torch.zeros(2))


def test_a_graph_on_the_stream_of_another_device_stays_empty(fake: StandIn) -> None:
    source = torch.ones(2, device="cuda:1")
    graph = CUDAGraph()
    with torch.cuda.graph(graph):
        source * 2

    assert not graph.recorded


def test_an_operation_fails_on_request(fake: StandIn) -> None:
    fake.fail(lambda: RuntimeError("a fault"), after=1)
    values = torch.ones(2, device="cuda")

    with pytest.raises(RuntimeError, match="a fault"):
        values + 1
    assert (values + 1).tolist() == [2, 2]


def test_without_a_stand_in_there_is_no_device() -> None:
    with stand_in():
        assert torch.cuda.is_available()

    assert not torch.cuda.is_available()
    assert torch.zeros(2)[0].item() == 0.0
