"""Bit layouts: how codes become bytes, and back.

Codes are sign and magnitude: bit `bits-1` is the sign, the bits below index a magnitude, so that code
`c` stands for `codebook[c]` with `codebook[c + 2**(bits-1)] == -codebook[c]`.  8-bit codes are the bytes
of a float8 format.

Tokens are packed in blocks of `BLOCK_TOKENS`.  A block is a matrix of `rows` x `n` codes, packed along `n`:

    keys     rows = tokens,   n = head_dim   (token-major:   contiguous along the contraction of q.k)
    values   rows = head_dim, n = tokens     (channel-major: contiguous along the contraction of p.v)

This is the order in which fp8 tensor cores take both operands.  Bytes of one row, by number of bits:

8 bits: byte j is code j.

4 bits: n/2 bytes, read as n/8 little-endian 32-bit words.  Word w holds four codes of the row's first half,
lo[i] = code[4w + i], and four of its second half, hi[i] = code[n/2 + 4w + i]  (m: magnitude, 3 bits; s: sign):

    bit   31 30..28 27 26..24 23 22..20 19 18..16 15 14..12 11 10..8  7  6..4   3  2..0
          s  m      s  m      s  m      s  m      s  m      s  m      s  m      s  m
    of  lo[3] hi[3] hi[3] hi[2] lo[2] hi[1] hi[2] hi[0] lo[1] lo[3] hi[1] lo[2] lo[0] lo[1] hi[0] lo[0]

so the low 16 bits are the selectors of one byte-permute for lo, the high 16 bits for hi; the signs of lo are
already at the sign bits of four e4m3 bytes, those of hi one shift (by 4) away.

3 bits: a plane of the two low bits, n/4 bytes a row, then a plane of the sign bits, n/8 bytes a row; the whole
block's first plane comes before the second.  2 bits: the first plane alone.  Both planes run over the row's four
quarters, q[i] = code[q * n/4 + 4w + i] for q = 0..3, i = 0..3:

    first plane, 32-bit word w     bit  4i, 4i+1        2 bits of quarter 0
                                        4i+2, 4i+3                quarter 1
                                        16+4i, 16+4i+1            quarter 2
                                        16+4i+2, 16+4i+3          quarter 3
    sign plane, 16-bit word w      bit  7  6  5  4  3  2  1  0    byte 0: quarters 0 and 1
                                   i =  3  1  3  1  2  0  2  0
                             quarter =  1  0  0  1  1  0  0  1    byte 1: the same with quarters 2 and 3

(the sign bits lie where one mask and at most one shift bring them to bit 2 of the selectors' nibbles).
"""

import torch

BLOCK_TOKENS = 64

# For quarters (0, 1) of a sign-plane byte: the bit that belongs to code i = 0..3 (drawn above).
_SIGN_BITS = ((2, 6, 1, 5), (0, 4, 3, 7))


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of a row of `n` codes.  Raises ValueError unless `n` is a multiple of 16 and bits is 2, 3, 4 or 8."""
    if n % 16 or bits not in (2, 3, 4, 8):
        raise ValueError(f"expected a multiple of 16 codes in 2, 3, 4 or 8 bits, got {n} codes in {bits} bits")
    return n * bits // 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [..., rows, n], each below 2**bits, to bytes uint8 [..., rows * packed_bytes(n, bits)]."""
    packed_bytes(codes.shape[-1], bits)
    if bits == 8:
        return codes.flatten(-2)
    if bits == 4:
        return _pack_sign_magnitude(codes).flatten(-2)
    planes = [_pack_low_bits(codes & 3).flatten(-2)]
    if bits == 3:
        planes.append(_pack_signs(codes >> 2).flatten(-2))
    return torch.cat(planes, dim=-1)


def unpack(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """Bytes uint8 [..., rows * packed_bytes(n, bits)] to codes uint8 [..., rows, n]: the inverse of `pack`."""
    rows = packed.shape[-1] // packed_bytes(n, bits)
    if bits == 8:
        return packed.unflatten(-1, (rows, n))
    if bits == 4:
        return _unpack_sign_magnitude(packed.unflatten(-1, (rows, n // 8, 4)))
    low_bits = _unpack_low_bits(packed[..., : rows * n // 4].unflatten(-1, (rows, n // 16, 4)))
    if bits == 2:
        return low_bits
    signs = _unpack_signs(packed[..., rows * n // 4 :].unflatten(-1, (rows, n // 16, 2)))
    return low_bits | (signs << 2)


def _pack_sign_magnitude(codes: torch.Tensor) -> torch.Tensor:
    lo, hi = codes.unflatten(-1, (2, -1, 4)).unbind(-3)  # each [..., n/8, 4]
    magnitudes = (torch.cat([lo, hi], dim=-1) & 7).unflatten(-1, (4, 2))  # two to a byte
    signs = ((lo & 8) << 4) | (hi & 8)
    return (magnitudes[..., 0] | (magnitudes[..., 1] << 4) | signs).flatten(-2)


def _unpack_sign_magnitude(words: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.stack([words & 7, (words >> 4) & 7], dim=-1).flatten(-2)
    signs = torch.cat([(words >> 4) & 8, words & 8], dim=-1)
    lo, hi = (magnitudes | signs).split(4, dim=-1)
    return torch.cat([lo.flatten(-2), hi.flatten(-2)], dim=-1)


def _pack_low_bits(codes: torch.Tensor) -> torch.Tensor:
    quarters = codes.unflatten(-1, (4, -1, 4)).unbind(-3)  # each [..., n/16, 4]
    nibbles = torch.cat([quarters[0] | (quarters[1] << 2), quarters[2] | (quarters[3] << 2)], dim=-1).unflatten(
        -1, (4, 2)
    )
    return (nibbles[..., 0] | (nibbles[..., 1] << 4)).flatten(-2)


def _unpack_low_bits(words: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack([words & 15, words >> 4], dim=-1).flatten(-2)
    first, second = nibbles.split(4, dim=-1)
    quarters = (first & 3, first >> 2, second & 3, second >> 2)
    return torch.cat([quarter.flatten(-2) for quarter in quarters], dim=-1)


def _pack_signs(signs: torch.Tensor) -> torch.Tensor:
    halves = signs.unflatten(-1, (2, 2, -1, 4))  # [..., byte, quarter of the byte, n/16, i]
    shifts = torch.tensor(_SIGN_BITS, dtype=torch.uint8, device=signs.device)[:, None, :]
    bytes_ = (halves << shifts).sum(dim=(-3, -1), dtype=torch.uint8)  # the bits are distinct, so the sum is an or
    return bytes_.transpose(-1, -2).flatten(-2)


def _unpack_signs(words: torch.Tensor) -> torch.Tensor:
    quarters = [
        torch.stack([(byte >> shift) & 1 for shift in shifts], dim=-1).flatten(-2)
        for byte in words.unbind(-1)
        for shifts in _SIGN_BITS
    ]
    return torch.cat(quarters, dim=-1)
