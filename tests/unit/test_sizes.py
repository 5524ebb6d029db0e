"""Box sizes: the default from free memory, and what is refused before anything runs."""

from __future__ import annotations

import pytest

from disagg.config import load_topology
from disagg.engine.simulated_settings import simulated_layout
from disagg.errors import ConfigError
from disagg.kv.box import available_memory_bytes, host_memory_bytes
from disagg.kv.layout import KvLayout
from disagg.kv.sizes import GIB, MAX_DEFAULT_BYTES, check_host, check_longest_prompt, default_box_bytes
from tests.builders import ROOT, sim_topology

LAYOUT = KvLayout(model="m", backend="b", dtype="bf16", block_tokens=16, num_layers=30, block_bytes=12288)  # SmolLM2-135M


def test_the_default_is_a_share_of_a_quarter_of_what_is_free() -> None:
    assert default_box_bytes(16 * GIB, workers_on_host=2) == GIB
    assert default_box_bytes(1000 * GIB, workers_on_host=1) == MAX_DEFAULT_BYTES
    assert default_box_bytes(1, workers_on_host=64) == 1 << 20
    for workers in range(1, 200):
        size = default_box_bytes(23 * GIB, workers)
        assert size % (1 << 20) == 0
        assert 2 * workers * size <= 23 * GIB // 4


def test_given_sizes_win() -> None:
    kv = sim_topology(box_bytes=1 << 20).kv
    assert kv.box_bytes(77) == (1 << 20, 1 << 20)
    assert kv.model_copy(update={"inbox_gib": None}).box_bytes(77) == (1 << 20, 77)


def test_boxes_beyond_the_hosts_memory_are_refused_with_the_sizes() -> None:
    check_host(4 * GIB, 4 * GIB, 2, 16 * GIB)
    with pytest.raises(ConfigError, match=r"3 workers on this host come to 24.00 GiB \(4.00 out and 4.00 in, each\); it has 16.00.*2.67"):
        check_host(4 * GIB, 4 * GIB, 3, 16 * GIB)


def test_a_box_below_the_longest_prompt_is_refused_with_the_size_that_would_do() -> None:
    needed = LAYOUT.entry_bytes(4095)
    check_longest_prompt(LAYOUT, 4096, needed, needed)
    for sizes, key in (((needed - 1, needed), "kv.outbox_gib"), ((needed, needed - 1), "kv.inbox_gib")):
        with pytest.raises(ConfigError, match="4095 tokens") as refusal:
            check_longest_prompt(LAYOUT, 4096, *sizes)
        assert refusal.value.key == key
        enough = int(float(refusal.value.expected.removeprefix("at least ")) * GIB)
        check_longest_prompt(LAYOUT, 4096, enough, enough)


def test_what_a_box_loses_to_whole_pages_is_not_counted_on() -> None:
    """5,000 bytes of KV need two pages, and a box of 6,000 bytes has one: this was found out by the first long prompt."""
    layout = KvLayout(model="m", backend="b", dtype="bf16", block_tokens=1, num_layers=1, block_bytes=1000)
    check_longest_prompt(layout, 6, 8192, 8192)
    with pytest.raises(ConfigError, match="5 tokens and 5000 bytes"):
        check_longest_prompt(layout, 6, 6000, 8192)


def test_memory_is_what_the_host_or_the_container_has() -> None:
    assert 0 < available_memory_bytes() <= host_memory_bytes() < 1 << 50


@pytest.mark.parametrize("name", ["sim-64", "sim-h100-4p4d"])
def test_shipped_simulated_topologies_fit(name: str) -> None:
    topology = load_topology(ROOT / f"cluster/topologies/{name}.yaml")
    for role in topology.active_pools():
        settings = topology.simulated(role)
        check_longest_prompt(simulated_layout(settings), settings.max_model_len, *topology.kv.box_bytes(0))
