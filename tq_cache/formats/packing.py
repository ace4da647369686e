"""Bit layouts: how codes become bytes, and back.

Codes are sign and magnitude: bit `bits-1` is the sign, the bits below index a magnitude, so that code
`c` stands for `codebook[c]` with `codebook[c + 2**(bits-1)] == -codebook[c]`.  8-bit codes are the bytes
of a float8 format, or of int8.

Tokens are packed in blocks of `BLOCK_TOKENS`.  A block is a matrix of `rows` x `n` codes, packed along `n`:

    keys     rows = tokens,   n = head_dim   (token-major:   contiguous along the contraction of q.k)
    values   rows = head_dim, n = tokens     (channel-major: contiguous along the contraction of p.v)

This is the order in which fp8 tensor cores take both operands.  Latents, which are keys and values at once, and rotary
keys are packed as keys.  Bytes of one row, by number of bits:

8 bits: byte j is code j.

4 bits: n/2 bytes, read as n/8 little-endian 32-bit words.  Word w holds four codes of the row's first half,
lo[i] = code[4w + i], and four of its second half, hi[i] = code[n/2 + 4w + i]  (m: magnitude, 3 bits; s: sign):

    bit   31 30..28 27 26..24 23 22..20 19 18..16 15 14..12 11 10..8  7  6..4   3  2..0
          s  m      s  m      s  m      s  m      s  m      s  m      s  m      s  m
    of  lo[3] hi[3] hi[3] hi[2] lo[2] hi[1] hi[2] hi[0] lo[1] lo[3] hi[1] lo[2] lo[0] lo[1] hi[0] lo[0]

so the low 16 bits are the selectors of one byte-permute for lo, the high 16 bits for hi; the signs of lo are
already at the sign bits of four e4m3 bytes, those of hi one shift (by 4) away.

3 bits: a plane of 32-bit words, n/4 bytes a row, then a plane of 16-bit words, n/8 bytes a row; the whole block's
first plane comes before the second.  Words w of both hold four codes of each of the row's quarters, q[i] =
code[q * n/4 + 4w + i] for q = 0..3, i = 0..3.  Nibbles are selectors of three bits; the bit left over in those of the
first three quarters is one of the fourth's (2: its sign):

    first plane   bit  16+4i+3   16+4i+2 .. 16+4i     4i+3   4i+2 .. 4i
                  of   q3 bit 2  q1                   q3 bit 0  q0
    second plane  bit                                 4i+3   4i+2 .. 4i
                  of                                  q3 bit 1  q2

so with a = first word, b = second word, both less what a mask of 0x7s keeps, the selectors of the fourth quarter are
a * (1 + 2**14) + b * 2**15, shifted right by 17.

2 bits: one plane of 32-bit words, n/4 bytes a row, of the row's four quarters:

    bit  16+4i+3, 16+4i+2   16+4i+1, 16+4i   4i+3, 4i+2   4i+1, 4i
    of   q3                 q2               q1           q0
"""

import torch

BLOCK_TOKENS = 64


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
    if bits == 3:
        return torch.cat([plane.flatten(-2) for plane in _pack_three_bits(codes)], dim=-1)
    return _pack_two_bits(codes).flatten(-2)


def unpack(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """Bytes uint8 [..., rows * packed_bytes(n, bits)] to codes uint8 [..., rows, n]: the inverse of `pack`."""
    rows = packed.shape[-1] // packed_bytes(n, bits)
    if bits == 8:
        return packed.unflatten(-1, (rows, n))
    if bits == 4:
        return _unpack_sign_magnitude(packed.unflatten(-1, (rows, n // 8, 4)))
    words = packed[..., : rows * n // 4].unflatten(-1, (rows, n // 16, 4))
    if bits == 2:
        return _unpack_two_bits(words)
    return _unpack_three_bits(words, packed[..., rows * n // 4 :].unflatten(-1, (rows, n // 16, 2)))


def _pack_sign_magnitude(codes: torch.Tensor) -> torch.Tensor:
    lo, hi = codes.unflatten(-1, (2, -1, 4)).unbind(-3)  # each [..., n/8, 4]
    signs = ((lo & 8) << 4) | (hi & 8)
    return (_nibbles_to_bytes(torch.cat([lo, hi], dim=-1) & 7) | signs).flatten(-2)


def _unpack_sign_magnitude(words: torch.Tensor) -> torch.Tensor:
    magnitudes = _bytes_to_nibbles(words & 0x77)
    signs = torch.cat([(words >> 4) & 8, words & 8], dim=-1)
    lo, hi = (magnitudes | signs).split(4, dim=-1)
    return torch.cat([lo.flatten(-2), hi.flatten(-2)], dim=-1)


def _nibbles_to_bytes(nibbles: torch.Tensor) -> torch.Tensor:
    pairs = nibbles.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _bytes_to_nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    return torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(-2)


def _quarters(codes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return codes.unflatten(-1, (4, -1, 4)).unbind(-3)  # each [..., n/16, 4]


def _pack_three_bits(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q0, q1, q2, q3 = _quarters(codes)
    first = torch.cat([q0 | ((q3 & 1) << 3), q1 | ((q3 & 4) << 1)], dim=-1)
    second = q2 | ((q3 & 2) << 2)
    return _nibbles_to_bytes(first).flatten(-2), _nibbles_to_bytes(second).flatten(-2)


def _unpack_three_bits(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    n0, n1 = _bytes_to_nibbles(first).split(4, dim=-1)
    n2 = _bytes_to_nibbles(second)
    quarters = (n0 & 7, n1 & 7, n2 & 7, (n0 >> 3) | ((n2 >> 3) << 1) | ((n1 >> 3) << 2))
    return torch.cat([quarter.flatten(-2) for quarter in quarters], dim=-1)


def _pack_two_bits(codes: torch.Tensor) -> torch.Tensor:
    q0, q1, q2, q3 = _quarters(codes)
    return _nibbles_to_bytes(torch.cat([q0 | (q1 << 2), q2 | (q3 << 2)], dim=-1)).flatten(-2)


def _unpack_two_bits(words: torch.Tensor) -> torch.Tensor:
    first, second = _bytes_to_nibbles(words).split(4, dim=-1)
    quarters = (first & 3, first >> 2, second & 3, second >> 2)
    return torch.cat([quarter.flatten(-2) for quarter in quarters], dim=-1)
