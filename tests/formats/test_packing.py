"""Bit layouts: exact round trips, and every bit where the drawing in `tq_cache/formats/packing.py` puts it."""

import pytest
import torch

from tq_cache.formats.codebook import GAUSSIAN
from tq_cache.formats.packing import BLOCK_TOKENS, pack, packed_bytes, unpack

BITS = (2, 3, 4, 8)
# Head dims and block widths, most of them no powers of two.
WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 320, 576)


def random_codes(generator: torch.Generator, bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)


# ------------------------------------------------------------- a slow packer, written from the drawing, bit by bit

# 4 bits, one line per field of the drawing, from bit 31 down: (lowest bit, field, half, i).
FOUR_BITS = [
    (31, "s", "lo", 3), (28, "m", "hi", 3), (27, "s", "hi", 3), (24, "m", "hi", 2),
    (23, "s", "lo", 2), (20, "m", "hi", 1), (19, "s", "hi", 2), (16, "m", "hi", 0),
    (15, "s", "lo", 1), (12, "m", "lo", 3), (11, "s", "hi", 1), (8, "m", "lo", 2),
    (7, "s", "lo", 0), (4, "m", "lo", 1), (3, "s", "hi", 0), (0, "m", "lo", 0),
]  # fmt: skip
# 3 bits, for each plane: (bytes of a word, what one of its nibbles i holds: (lowest bit, quarter, bit of its code)).
THREE_BITS = [
    (4, [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 3, 0), (16, 1, 0), (17, 1, 1), (18, 1, 2), (19, 3, 2)]),
    (2, [(0, 2, 0), (1, 2, 1), (2, 2, 2), (3, 3, 1)]),
]
TWO_BITS = (4, [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (16, 2, 0), (17, 2, 1), (18, 3, 0), (19, 3, 1)])


def slow_pack(rows: list[list[int]], bits: int) -> bytes:
    if bits == 8:
        return b"".join(bytes(row) for row in rows)
    if bits == 4:
        return b"".join(slow_four_bits(row) for row in rows)
    planes = [TWO_BITS] if bits == 2 else THREE_BITS
    return b"".join(slow_plane(row, *plane) for plane in planes for row in rows)


def slow_four_bits(row: list[int]) -> bytes:
    out = b""
    for w in range(len(row) // 8):
        word = 0
        for bit, field, half, i in FOUR_BITS:
            code = row[4 * w + i + (len(row) // 2 if half == "hi" else 0)]
            word |= (code >> 3 if field == "s" else code & 7) << bit
        out += word.to_bytes(4, "little")
    return out


def slow_plane(row: list[int], size: int, fields: list[tuple[int, int, int]]) -> bytes:
    out = b""
    for w in range(len(row) // 16):
        word = 0
        for i in range(4):
            for lowest, quarter, bit in fields:
                word |= (row[quarter * len(row) // 4 + 4 * w + i] >> bit & 1) << (4 * i + lowest)
        out += word.to_bytes(size, "little")
    return out


# ----------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", WIDTHS)
def test_round_trip_is_exact(bits, n, generator):
    for rows in (1, 3, 17, BLOCK_TOKENS):
        codes = random_codes(generator, bits, 2, 3, rows, n)
        packed = pack(codes, bits)
        assert packed.dtype == torch.uint8
        assert packed.shape == (2, 3, rows * n * bits // 8)
        assert torch.equal(unpack(packed, bits, n), codes)


@pytest.mark.parametrize("bits", BITS)
def test_packing_uses_every_bit(bits, generator):
    """Any bytes are the packing of some codes: unpack, then pack, is the identity too."""
    packed = torch.randint(0, 256, (5, 7 * packed_bytes(48, bits)), generator=generator, dtype=torch.uint8)
    assert torch.equal(pack(unpack(packed, bits, 48), bits), packed)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("rows", [1, 5])
def test_layout_is_the_drawn_one(bits, n, rows, generator):
    codes = random_codes(generator, bits, rows, n)
    assert bytes(pack(codes, bits).tolist()) == slow_pack(codes.tolist(), bits)


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_each_bit_of_a_code_lands_on_the_drawn_bit(bits):
    """One bit set at a time, so that no two faults can hide each other."""
    n = 32
    for position in range(n):
        for bit in range(bits):
            codes = torch.zeros(2, n, dtype=torch.uint8)
            codes[1, position] = 1 << bit
            assert bytes(pack(codes, bits).tolist()) == slow_pack(codes.tolist(), bits), (position, bit)


def test_four_bit_words_decode_with_two_byte_permutes(generator):
    """The claim behind the 4-bit layout: selectors in place, signs of lo in place, signs of hi a shift by 4 away."""
    n = 64
    table = torch.tensor(GAUSSIAN[4].magnitudes).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    codes = random_codes(generator, 4, n)
    e4m3 = GAUSSIAN[4].values()[codes.int()].to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    words = bytes(pack(codes[None], 4).tolist())

    def permute(selectors: int) -> int:
        return sum(table[selectors >> (4 * i) & 7] << (8 * i) for i in range(4))

    lo, hi = b"", b""
    for w in range(n // 8):
        word = int.from_bytes(words[4 * w : 4 * w + 4], "little")
        lo += (permute(word & 0x7777) | (word & 0x80808080)).to_bytes(4, "little")
        hi += (permute(word >> 16 & 0x7777) | (word << 4 & 0x80808080)).to_bytes(4, "little")
    assert list(lo + hi) == e4m3


def test_three_bit_words_decode_with_four_byte_permutes(generator):
    """The claim behind the 3-bit layout: selectors of three quarters in place, the fourth's by multiplications."""
    n = 64
    table = GAUSSIAN[3].values().to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    codes = random_codes(generator, 3, n)
    packed = bytes(pack(codes[None], 3).tolist())
    quarters: list[list[int]] = [[], [], [], []]
    for w in range(n // 16):
        first = int.from_bytes(packed[4 * w : 4 * w + 4], "little")
        second = int.from_bytes(packed[n // 4 + 2 * w : n // 4 + 2 * w + 2], "little")
        rest = ((first & 0x88888888) * (1 + 2**14) + (second & 0x8888) * 2**15) % 2**32 >> 17
        for quarter, selectors in zip(quarters, (first, first >> 16, second, rest), strict=True):
            quarter += [table[selectors >> (4 * i) & 7] for i in range(4)]
        assert rest & 0x8888 == 0
    assert sum(quarters, []) == [table[code] for code in codes.tolist()]


@pytest.mark.parametrize("bits", BITS)
def test_non_contiguous_codes_and_bytes(bits, generator):
    codes = random_codes(generator, bits, 2, BLOCK_TOKENS, 96).transpose(-1, -2)  # channel-major, as values are
    packed = pack(codes, bits)
    assert torch.equal(packed, pack(codes.contiguous(), bits))
    spread = torch.zeros(2, 2 * packed.shape[-1], dtype=torch.uint8)[:, ::2].copy_(packed)
    assert torch.equal(unpack(spread, bits, BLOCK_TOKENS), codes)


def test_rows_do_not_mix(generator):
    """A row packs alike alone and among others (planes apart), which is what a partial block relies on."""
    codes = random_codes(generator, 4, 6, 64)
    assert torch.equal(pack(codes, 4).unflatten(-1, (6, -1))[4], pack(codes[4:5], 4))


@pytest.mark.parametrize(("n", "bits", "expected"), [(128, 4, 64), (128, 3, 48), (128, 2, 32), (128, 8, 128),
                                                     (80, 4, 40), (80, 3, 30), (80, 2, 20), (576, 3, 216)])  # fmt: skip
def test_bytes_of_a_row(n, bits, expected):
    assert packed_bytes(n, bits) == expected


@pytest.mark.parametrize(("n", "bits"), [(24, 4), (8, 2), (65, 8), (64, 1), (64, 5), (64, 16)])
def test_unsupported_sizes_are_refused(n, bits):
    message = f"expected a multiple of 16 codes in 2, 3, 4 or 8 bits, got {n} codes in {bits} bits"
    with pytest.raises(ValueError, match=message):
        packed_bytes(n, bits)
    with pytest.raises(ValueError, match=message):
        pack(torch.zeros(1, n, dtype=torch.uint8), bits)
    with pytest.raises(ValueError, match=message):
        unpack(torch.zeros(n * 16, dtype=torch.uint8), bits, n)
