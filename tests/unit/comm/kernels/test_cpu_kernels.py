# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels against twins that handle one element at a time in plain Python."""

import ctypes
import math
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wavemare.comm.kernels import DTYPES, kernels_for, num_blocks
from wavemare.comm.kernels.numpy_kernels import NumpyKernels

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point]
GUARD = 8
"""Elements before and behind every tensor that a kernel gets; none may change."""


def made(name):
    if name == "numpy":
        return NumpyKernels()
    from wavemare.comm.kernels.numba_kernels import NumbaKernels

    return NumbaKernels()


NAMES = ["numba", "numpy"]


@pytest.fixture(params=NAMES)
def kernels(request):
    return made(request.param)


def bits_of(tensor):
    """Return the elements' bits as integers."""
    return tensor.view(SIGNED[tensor.element_size()]).tolist()


def from_bits(bits, dtype):
    return torch.tensor(bits, dtype=SIGNED[dtype.itemsize]).view(dtype)


class Guarded:
    """A copy of a tensor between guards, beginning at any element of an aligned memory."""

    def __init__(self, tensor, shift=0):
        size = tensor.numel()
        self.whole = torch.full((size + 2 * GUARD + shift,), 77).to(tensor.dtype)
        self.start = GUARD + shift
        self.tensor = self.whole[self.start : self.start + size]
        self.tensor.copy_(tensor)
        # Copying through another type could change a NaN.
        assert bits_of(self.tensor) == bits_of(tensor)

    def intact(self):
        before = self.whole[: self.start]
        after = self.whole[self.start + self.tensor.numel() :]
        return bool((before == 77).all()) and bool((after == 77).all())


def specials(dtype):
    if dtype == torch.int32:
        return torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 12345], dtype=dtype)
    info = torch.finfo(dtype)
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, info.max, -info.max, info.tiny]
    values += [info.smallest_normal / 2, info.eps, 0.1, -1e-3, 3.7]
    least = from_bits([1], dtype)  # the smallest subnormal
    return torch.cat([torch.tensor(values, dtype=torch.float64).to(dtype), least, -least])


def bucket(dtype, numel, block, density, rng):
    """Return a bucket with blocks of any numbers, of zeros of both signs, and of single ones."""
    values = specials(dtype)
    zeros = [i for i, value in enumerate(values.tolist()) if value == 0]
    picks = []
    for start in range(0, numel, block):
        size = min(block, numel - start)
        kind = rng.random()
        if kind >= density:
            picks += [rng.choice(zeros) for _ in range(size)]
        elif kind < density / 2:
            picks += [rng.randrange(len(values)) for _ in range(size)]
        else:
            picks += [zeros[0]] * (size - 1) + [rng.randrange(len(values))]
    return values[torch.tensor(picks, dtype=torch.int64)] if picks else values[:0]


def slow_mask(flat, block):
    """Return for each block whether it is not zero, and the bits that the bucket has then."""
    bits = bits_of(flat)
    found = []
    for start in range(0, flat.numel(), block):
        some = any(value != 0 for value in flat[start : start + block].tolist())
        found.append(some)
        if not some:
            bits[start : start + block] = [0] * len(bits[start : start + block])
    return found, bits


def run_mask(kernels, flat, block, shift=0):
    """Return what a kernel finds, and the bucket's bits then."""
    guarded = Guarded(flat, shift)
    blocks = num_blocks(flat.numel(), block)
    bits = Guarded(torch.full((-(-blocks // 8),), 255, dtype=torch.uint8))
    kernels.mask(guarded.tensor, block, bits.tensor)
    assert guarded.intact()
    assert bits.intact()
    packed = bits.tensor.tolist()
    found = [bool(packed[j // 8] >> (j % 8) & 1) for j in range(8 * len(packed))]
    assert not any(found[blocks:])
    return found[:blocks], bits_of(guarded.tensor)


def slow_reduce(packed, places, block, scale, dtype):
    """Return the sums' values of all blocks, element by element."""
    rounded = (lambda x: x) if dtype == torch.float64 else (lambda x: ctypes.c_float(x).value)
    elements = packed.tolist()
    result = []
    for column in zip(*places, strict=True):
        for i in range(block):
            terms = [elements[place * block + i] for place in column if place >= 0]
            if dtype == torch.int32:
                result.append((sum(terms) + 2**31) % 2**32 - 2**31)
                continue
            total = 0.0
            for term in terms:
                total = rounded(total + term)
            result.append(rounded(total * rounded(scale)) if scale != 1 else total)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    return [torch.tensor(value, dtype=wide).to(dtype) for value in result]


def assert_same(found, expected):
    """Bits must be the same, except that every NaN is as good as another."""
    assert found.numel() == len(expected)
    for one, other in zip(found, expected, strict=True):
        if math.isnan(other.item()):
            assert math.isnan(one.item())
        else:
            assert bits_of(one.reshape(1)) == bits_of(other.reshape(1)), (one, other)


def check_reduce(kernels, packed, places, block, scale, shift=0):
    source = Guarded(packed, shift)
    columns = len(places[0])
    out = Guarded(torch.full((columns * block,), 5).to(packed.dtype), shift)
    table = torch.tensor(places, dtype=torch.int64).reshape(len(places), columns)
    kernels.reduce(source.tensor, table, block, scale, out.tensor)
    assert out.intact()
    assert bits_of(source.tensor) == bits_of(packed)
    assert_same(out.tensor, slow_reduce(packed, places, block, scale, packed.dtype))
    return out.tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 2, 3, 8, 15, 16, 17, 33, 100])
def test_mask_with_ragged_tails_and_unaligned_starts(kernels, dtype, block):
    rng = random.Random(block)
    for tail in range(min(block, 40)):
        flat = bucket(dtype, 19 * block + tail, block, 0.5, rng)
        assert run_mask(kernels, flat, block, tail % 4) == slow_mask(flat, block)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(0, 900),
    block=st.integers(1, 300),
    density=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_mask_of_any_bucket(name, dtype, numel, block, density, shift, seed):
    flat = bucket(dtype, numel, block, density, random.Random(seed))
    assert run_mask(made(name), flat, block, shift) == slow_mask(flat, block)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_anywhere_makes_a_block_nonzero_but_a_sign_does_not(kernels, dtype):
    width = 8 * dtype.itemsize
    block = 24
    for bit in range(width):
        sign = dtype.is_floating_point and bit == width - 1
        for place in (0, 1, 15, 16, 17, block - 1):
            bits = [0] * (3 * block)
            bits[block + place] = (1 << bit) - (1 << width) * (bit == width - 1)
            found, after = run_mask(kernels, from_bits(bits, dtype), block)
            assert found == [False, not sign, False]
            assert after == ([0] * len(bits) if sign else bits)


@pytest.mark.parametrize("dtype", FLOATS)
def test_blocks_do_not_change_unless_all_their_elements_are_zeros(kernels, dtype):
    flat = torch.full((64,), -0.0, dtype=dtype)
    flat[20] = math.nan
    flat[33], flat[40] = 1.0, -1.0  # their sum is zero, they are not
    before = bits_of(flat)
    found, after = run_mask(kernels, flat, 16)
    assert found == [False, True, True, False]
    assert after == [0] * 16 + before[16:48] + [0] * 16


@pytest.mark.parametrize("block", [64, 300, 768, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_of_large_blocks_with_only_the_last_element(kernels, dtype, block):
    flat = torch.zeros(11 * block - 1, dtype=dtype)
    active = [1, 2, 7, 10]
    for j in active:
        flat[min((j + 1) * block, flat.numel()) - 1] = 1
    found, after = run_mask(kernels, flat, block, 1)
    assert [j for j, some in enumerate(found) if some] == active
    assert after == bits_of(flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elements_may_lie_at_odd_addresses(kernels, dtype):
    flat = bucket(dtype, 205, 20, 0.5, random.Random(3))
    memory = bytearray(flat.numel() * dtype.itemsize + 1)
    memory[1:] = flat.view(torch.uint8).numpy().tobytes()
    odd = torch.frombuffer(memory, dtype=dtype, offset=1)
    expected, after = slow_mask(flat, 20)
    bits = torch.empty(2, dtype=torch.uint8)
    kernels.mask(odd, 20, bits)
    assert np.unpackbits(bits.numpy(), count=11, bitorder="little").tolist() == expected
    assert bits_of(odd) == after


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(0, 900),
    block=st.integers(1, 300),
    density=st.floats(0, 1),
    ordered=st.booleans(),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_gather_and_scatter_copy_blocks(name, dtype, numel, block, density, ordered, shift, seed):
    kernels, rng = made(name), random.Random(seed)
    flat = bucket(dtype, numel, block, 1.0, rng)
    numbers = [j for j in range(num_blocks(numel, block)) if rng.random() < density]
    if not ordered:
        rng.shuffle(numbers)
    index = torch.tensor(numbers, dtype=torch.int64)
    source = Guarded(flat, shift)
    packed = Guarded(torch.full((len(numbers) * block,), 9).to(dtype), shift)
    kernels.gather(source.tensor, block, index, packed.tensor)
    assert packed.intact()
    bits = bits_of(flat)
    expected = []
    for j in numbers:
        expected += [bits[e] if e < numel else 0 for e in range(j * block, (j + 1) * block)]
    assert bits_of(packed.tensor) == expected
    assert bits_of(source.tensor) == bits

    target = Guarded(torch.full((numel,), 3).to(dtype), shift)
    kernels.scatter(packed.tensor, block, index, target.tensor)
    assert target.intact()
    three = bits_of(torch.full((1,), 3).to(dtype))[0]
    chosen = set(numbers)
    assert bits_of(target.tensor) == [
        bits[e] if e // block in chosen else three for e in range(numel)
    ]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    ranks=st.integers(1, 5),
    columns=st.integers(0, 5),
    block=st.integers(1, 120),
    density=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, 0.2]),
    special=st.booleans(),
    ordered=st.booleans(),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_reduce_sums_in_the_order_of_the_ranks(
    name, dtype, ranks, columns, block, density, scale, special, ordered, shift, seed
):
    rng = random.Random(seed)
    present = [[rng.random() < density for _ in range(columns)] for _ in range(ranks)]
    rows = sum(map(sum, present))
    numbers = list(range(rows))
    if not ordered:
        rng.shuffle(numbers)
    rest = iter(numbers)
    places = [[next(rest) if here else -1 for here in row] for row in present]
    if special:
        packed = bucket(dtype, rows * block, block, 0.8, rng)
    else:
        packed = torch.tensor([rng.uniform(-99, 99) for _ in range(rows * block)]).to(dtype)
    scale = scale if dtype.is_floating_point else 1.0
    check_reduce(made(name), packed, places, block, scale, shift)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [2047, 2048, 2049, 4100])
def test_reduce_of_blocks_longer_than_a_chunk(kernels, dtype, block):
    rng = random.Random(block)
    packed = torch.tensor([rng.uniform(-9, 9) for _ in range(3 * block)]).to(dtype)
    scale = 1 / 3 if dtype.is_floating_point else 1.0
    check_reduce(kernels, packed, [[1, -1], [0, 2]], block, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_reduce_of_many_blocks_in_any_order(kernels, dtype):
    generator = torch.Generator().manual_seed(0)
    block, columns, ranks = 64, 1200, 3
    packed = torch.randn(ranks * columns * block, generator=generator).to(dtype)
    places = torch.randperm(ranks * columns, generator=generator).view(ranks, columns)
    places[torch.rand(places.shape, generator=generator) < 0.3] = -1
    out = torch.empty(columns * block, dtype=dtype)
    kernels.reduce(packed, places, block, 0.25, out)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    sums = torch.zeros(columns, block, dtype=wide)
    for where in places:
        rows = packed.view(-1, block)[where.clamp(min=0)].to(wide)
        sums += torch.where((where >= 0)[:, None], rows, torch.zeros((), dtype=wide))
    assert bits_of(out) == bits_of((sums * 0.25).to(dtype).flatten())


def test_the_order_of_the_ranks_shows(kernels):
    packed = torch.tensor([1e8, -1e8, 1.0])
    sums = [
        check_reduce(kernels, packed, [[a], [b], [c]], 1, 1.0).item()
        for a, b, c in ([0, 1, 2], [0, 2, 1], [2, 0, 1])
    ]
    assert sums == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_of_the_sum_are_positive(kernels, dtype):
    packed = torch.tensor([-0.0, -0.0, 1.0, -1.0], dtype=dtype)
    places = [[0, 0, 2, -1], [-1, 1, 3, -1]]
    out = check_reduce(kernels, packed, places, 1, 1.0)
    assert bits_of(out) == [0, 0, 0, 0]


def test_sixteen_bits_are_rounded_once_and_scaled_before(kernels):
    # Rounded after each term, the ones would vanish; unscaled, the sum would be infinite.
    packed = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
    assert check_reduce(kernels, packed, [[0], [1], [2]], 1, 1.0).item() == 258.0
    packed = torch.tensor([60000.0, 60000.0], dtype=torch.float16)
    assert check_reduce(kernels, packed, [[0], [1]], 1, 0.5).item() == 60000.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_sixteen_bits_survives(kernels, dtype):
    every = torch.arange(65536).to(torch.uint16).view(dtype)
    out = torch.empty_like(every)
    kernels.reduce(every, torch.zeros(1, 1, dtype=torch.int64), 65536, 1.0, out)
    nan = every.isnan()
    assert bool(out.isnan()[nan].all())
    # Adding +0.0 turns -0.0 round.
    expected = [0 if bits == -(2**15) else bits for bits in bits_of(every[~nan])]
    assert bits_of(out[~nan]) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_sixteen_bits_is_that_of_torch(kernels, dtype):
    # A number of 16 bits times a scale of 24 bits: halfway cases, subnormals, overflows and all.
    every = torch.arange(65536).to(torch.uint16).view(dtype)
    every = every[~every.isnan()]
    where = torch.zeros(1, 1, dtype=torch.int64)
    scales = [1 + 2.0**-8, 1 + 2.0**-11, 1 / 3, 2.0**-9, 1.5 * 2.0**-7, 3.0, 1000.1]
    for scale in scales:
        out = torch.empty_like(every)
        kernels.reduce(every, where, every.numel(), scale, out)
        expected = (every.float() + 0.0) * torch.tensor(scale)
        assert bits_of(out) == bits_of(expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_infinities_cancel_to_nan(kernels, dtype):
    packed = torch.tensor([math.inf, -math.inf, 1.0, math.nan], dtype=dtype)
    out = check_reduce(kernels, packed, [[0, 0, 3], [1, 2, 2]], 1, 0.5)
    assert out.isnan().tolist() == [True, False, True]


def test_integers_wrap_around(kernels):
    packed = torch.tensor([2**31 - 1, 1], dtype=torch.int32)
    assert check_reduce(kernels, packed, [[0], [1]], 1, 1.0).item() == -(2**31)


def test_buckets_of_more_than_two_to_the_31_elements(kernels):
    block = 4096
    numel = 2**31 + 2 * block + 5
    # Memory that was never written takes no room.
    flat = torch.from_numpy(np.zeros(numel, np.int16)).view(torch.bfloat16)
    blocks = num_blocks(numel, block)
    flat[-1] = 3
    flat[2**31 + 7] = 2
    bits = torch.empty(-(-blocks // 8), dtype=torch.uint8)
    kernels.mask(flat, block, bits)
    found = np.flatnonzero(np.unpackbits(bits.numpy(), bitorder="little")).tolist()
    assert found == [2**31 // block, blocks - 1]
    packed = torch.full((2 * block,), 9, dtype=torch.bfloat16)
    kernels.gather(flat, block, torch.tensor(found), packed)
    assert packed.nonzero().flatten().tolist() == [7, block + 4]
    kernels.scatter(packed, block, torch.tensor([2**31 // block + 1, 0]), flat)
    assert flat[2**31 + block + 7] == 2
    assert flat[4] == 3


def test_kernels_let_other_threads_run():
    from wavemare.comm.kernels.numba_kernels import _reduce

    # The compiled function itself, as torch would let others run on the way to it.
    packed, out = np.ones(256, np.float32), np.empty(256, np.float32)
    places = np.zeros((1_000_000, 1), np.int64)
    _reduce(packed, places[:1], 256, np.float32(1), out)

    def runs_meanwhile():
        begun, ended = threading.Event(), []

        def work():
            begun.set()
            _reduce(packed, places, 256, np.float32(1), out)
            ended.append(time.perf_counter())

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        here = time.perf_counter()
        thread.join()
        return here < ended[0]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # a thread that keeps the lock is not interrupted
    try:
        # On a busy machine this thread may wake up too late once, but not always.
        assert any(runs_meanwhile() for _ in range(20))
    finally:
        sys.setswitchinterval(interval)


def test_kernels_work_where_no_cache_can_be_written():
    from wavemare.comm.compiled import compiled

    # numba has no place to keep functions without a file.
    names = {}
    exec("def twice(x):\n    return 2 * x", names)
    assert compiled(names["twice"])(21) == 42


USE = """
import torch
from wavemare.comm.kernels import numba_kernels
bits = torch.empty(1, dtype=torch.uint8)
numba_kernels.NumbaKernels().mask(torch.ones(8), 4, bits)
assert bits.item() == 3
print(sum(numba_kernels._mask.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_compiled_kernels_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", USE]
    hits = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        for _ in range(2)
    ]
    assert hits == ["0", "1"]


def test_kernels_of_a_cpu_are_compiled_where_numba_is_installed(monkeypatch):
    kernels_for.cache_clear()
    assert type(kernels_for("cpu")).__name__ == "NumbaKernels"
    kernels_for.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in ("compiled", "kernels.numba_kernels"):
        monkeypatch.delitem(sys.modules, f"wavemare.comm.{name}")
    assert type(kernels_for("cpu")) is NumpyKernels
    kernels_for.cache_clear()
