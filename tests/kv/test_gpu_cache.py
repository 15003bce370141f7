"""The KV cache on a GPU: what the host decides reaches the device without anybody waiting, replays included."""

from __future__ import annotations

import pytest
import torch

from epicute.kv.cache import CacheSpec, KVCache

pytestmark = pytest.mark.gpu

SPEC = CacheSpec(layers=1, kv_heads=1, head_dim=64, page_size=16)


def test_the_host_s_part_waits_for_nothing() -> None:
    cache = KVCache.paged(SPEC, 4, 64, 12, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            cache.slots([20, 3])
            cache.advance([20, 3])
            cache.reserve_step()
            cache.begin_step()
            cache.end_step()
            cache.free(0)
            cache.reset()
        cache.slots([7], [2])
        cache.advance([7], [2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.lengths.tolist() == [0, 0, 7, 0]
    assert torch.equal(cache.page_table.cpu(), cache.host_table())


def test_cg_08_replays_go_on_while_requests_come_and_go() -> None:
    """Free one and prefill another between the host's half of a step and the replay."""
    cache = KVCache.paged(SPEC, 4, 64, 12, device="cuda")
    graph = torch.cuda.CUDAGraph()
    cache.begin_step()
    cache.end_step()
    with torch.cuda.graph(graph):
        cache.begin_step()
        cache.end_step()
    cache.slots([10, 5])
    cache.advance([10, 5])
    cache.reserve_step()
    cache.free(1)
    cache.slots([7], [2])
    cache.advance([7], [2])
    graph.replay()
    assert cache.step_positions.tolist() == [10, -1, -1, -1]
    assert cache.step_lengths.tolist() == [11, 0, 7, 0]
    assert tuple(cache.lengths.tolist()) == cache.held == (11, 0, 7, 0)
    graph.replay()  # which nobody has announced
    assert tuple(cache.lengths.tolist()) == cache.held
    for _ in range(3):
        cache.reserve_step()
        graph.replay()
    assert tuple(cache.lengths.tolist()) == cache.held == (14, 0, 10, 0)
