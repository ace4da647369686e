"""The rotation: orthonormal at every width, made of Hadamard blocks, the same for ever."""

import hashlib

import pytest
import torch

from tq_cache.formats.rotation import (
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    check_head_dim,
    hadamard_blocks,
    rotate,
    rotation_matrix,
    unrotate,
)

CPU = torch.device("cpu")
HEAD_DIMS = range(32, 577, 16)
# sha256 over the signs of the matrix, row by row ('+', '-', '0'): a saved cache is read with the same matrix.
CHECKSUMS = {
    64: "b405683bd246a9df",
    80: "0399e6b4a53ad2ae",
    128: "3e1840e5cf27d7b0",
    192: "0ff761a309033cfd",
    576: "538d10bcbf9fb430",
}


def matrix(head_dim: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return rotation_matrix(head_dim, CPU, dtype)


def sylvester(size: int) -> torch.Tensor:
    """The Hadamard matrix by its definition: entry (i, j) is -1 to the number of bits that i and j share."""
    shared = torch.arange(size)[:, None] & torch.arange(size)
    return 1.0 - 2.0 * sum(shared >> bit & 1 for bit in range(10)).remainder(2).double()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_orthonormal(head_dim):
    check_head_dim(head_dim)
    r = matrix(head_dim)
    assert r.shape == (head_dim, head_dim)
    torch.testing.assert_close(r @ r.T, torch.eye(head_dim, dtype=torch.float64), atol=1e-13, rtol=0)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_block_structure(head_dim):
    """Every block is full, with entries of one size and columns that are those of a Hadamard matrix up to a sign."""
    blocks, start = hadamard_blocks(head_dim), 0
    assert sum(blocks) == head_dim and blocks == sorted(set(blocks), reverse=True)
    assert all(block & (block - 1) == 0 and block >= 16 for block in blocks)
    outside = matrix(head_dim).clone()
    for block in blocks:
        span = slice(start, start + block)
        part = outside[span, span]
        torch.testing.assert_close(part.abs(), torch.full_like(part, block**-0.5), atol=1e-15, rtol=0)
        assert torch.equal(part.sign() * sylvester(block), part[:1].sign().expand(block, block))
        outside[span, span] = 0
        start += block
    assert not outside.any()


@pytest.mark.parametrize("head_dim", CHECKSUMS)
def test_the_matrix_never_changes(head_dim):
    text = "".join("+" if x > 0 else "-" if x < 0 else "0" for x in matrix(head_dim).flatten().tolist())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == CHECKSUMS[head_dim]


def test_signs_are_random_and_differ_between_widths():
    signs = {head_dim: (matrix(head_dim)[0] > 0) for head_dim in (64, 128, 256)}
    assert all(0.3 < float(row.double().mean()) < 0.7 for row in signs.values())
    assert not torch.equal(signs[64], signs[128][:64])


@pytest.mark.parametrize("head_dim", (32, 48, 80, 128, 576))
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 5e-6), (torch.float64, 1e-13)], ids=str)
def test_unrotate_undoes_rotate(head_dim, dtype, atol, generator):
    x = torch.randn(2, 3, 5, head_dim, generator=generator, dtype=dtype)
    torch.testing.assert_close(unrotate(rotate(x)), x, atol=atol, rtol=0)
    torch.testing.assert_close(rotate(x), x @ matrix(head_dim, dtype).T, atol=atol, rtol=0)
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1), atol=10 * atol, rtol=0)


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_one_hot_is_spread_over_all_channels(head_dim):
    rotated = rotate(torch.eye(head_dim))
    torch.testing.assert_close(rotated.abs(), torch.full_like(rotated, head_dim**-0.5))


def test_made_in_inference_mode_it_works_outside():
    rotation_matrix.cache_clear()
    with torch.inference_mode():
        rotate(torch.ones(1, 112))
    x = torch.ones(1, 112, requires_grad=True)
    rotate(x).sum().backward()
    assert x.grad is not None and not matrix(112, torch.float32).is_inference()


@pytest.mark.parametrize("head_dim", (0, 16, 24, 33, 100, 120, 592, 1024))
def test_unsupported_widths_are_refused(head_dim):
    message = f"expected a head_dim that is a multiple of 16 from 32 to 576, got {head_dim}; name the layer in skip_"
    with pytest.raises(ValueError, match=message):
        check_head_dim(head_dim)


def test_limits():
    check_head_dim(MIN_HEAD_DIM)
    check_head_dim(MAX_HEAD_DIM)
    assert (MIN_HEAD_DIM, MAX_HEAD_DIM) == (32, 576)
