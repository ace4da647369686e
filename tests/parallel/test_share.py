"""Which KV heads a process holds."""

import pytest

from tq_cache import parallel


def at(monkeypatch, rank: int, world: int) -> None:
    monkeypatch.setattr(parallel, "rank_and_world", lambda: (rank, world))


@pytest.mark.parametrize(("rank", "world", "total", "held", "first"), [
    (0, 1, 8, 8, 0),
    (1, 2, 8, 8, 0),  # plans that replicate, latents
    (0, 2, 8, 4, 0),
    (1, 2, 8, 4, 4),
    (3, 4, 8, 2, 6),
    (3, 4, 8, 4, 4),  # two stages of two: tensor parallelism is the inner dimension
    (5, 8, 8, 2, 2),
])  # fmt: skip
def test_share(monkeypatch, rank, world, total, held, first):
    at(monkeypatch, rank, world)
    assert parallel.share_of_heads(total, held, "scales") == slice(first, first + held)


@pytest.mark.parametrize(("world", "total", "held"), [(1, 8, 4), (2, 8, 2), (2, 3, 2), (3, 8, 4), (2, 4, 8), (2, 4, 0)])
def test_what_cannot_be_a_share_raises(monkeypatch, world, total, held):
    at(monkeypatch, 0, world)
    with pytest.raises(
        ValueError, match=f"expected scales for the {held} KV heads .* got {total}, of which {held} cannot be a share"
    ):
        parallel.share_of_heads(total, held, "scales")


def test_without_torch_distributed():
    assert parallel.rank_and_world() == (0, 1)
