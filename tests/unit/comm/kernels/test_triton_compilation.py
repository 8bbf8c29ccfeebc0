# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels, compiled for GPUs without one, exactly as they would be started."""

import re
import subprocess
from collections import Counter

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from wavemare.comm.kernels import DTYPES, num_blocks
from wavemare.comm.triton_kernels import TritonKernels

KERNELS = ("mask", "gather", "scatter", "reduce")
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
pytestmark = pytest.mark.long


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.fixture(autouse=True)
def no_kernels_of_before(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def launches(kernel, dtype, block, numel, offset=0):
    """Return what a kernel would start on a bucket, which may begin at an odd address."""
    kept = []
    kernels = TritonKernels(start=kept.append)
    flat = torch.zeros(numel + offset, dtype=dtype)[offset:]
    count = num_blocks(numel, block)
    bits = torch.zeros(num_blocks(count, 8), dtype=torch.uint8)
    index = torch.arange(count)
    packed = torch.zeros(count * block, dtype=dtype)
    if kernel == "mask":
        kernels.mask(flat, block, bits)
    elif kernel == "gather":
        kernels.gather(flat, block, index, packed)
    elif kernel == "scatter":
        kernels.scatter(packed, block, index, flat)
    else:
        scale = 0.3 if dtype.is_floating_point else 1
        kernels.reduce(packed, index[None], block, scale, torch.empty_like(packed))
    return kept


def compiled(launch, capability):
    """Compile what a launch on such a GPU would compile: with Triton's own binder."""
    program = launch.program
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(program.signature, program.params, backend)
    bound, specialization, options = bind(*launch.arguments, **launch.options)
    # No public function of Triton does this.
    options, signature, constants, attributes = program._pack_args(
        backend, launch.options, bound, specialization, options
    )
    source = ASTSource(program, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def accesses(ptx):
    """Count (ld or st, bits) of the accesses to global memory."""
    counts = Counter()
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global(?:\.v(\d))?\.b(\d+)", ptx):
        counts[kind, int(vector or 1) * int(bits)] += 1
    assert counts.total() == len(re.findall(r"\b(?:ld|st)\.global", ptx))
    return counts


def wide_and_narrow(counts, kind, bits=128):
    return counts[kind, bits], sum(n for (k, b), n in counts.items() if k == kind and b < bits)


def resources(binary, path):
    """Return the registers of a thread, and its bytes of stack and local memory."""
    path.write_bytes(binary.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    told = subprocess.check_output([tool, "--dump-resource-usage", path], text=True)
    return [int(re.search(rf"\b{name}:(\d+)", told)[1]) for name in ("REG", "STACK", "LOCAL")]


@pytest.mark.parametrize("capability", [80, 90, 100])
@every_kernel
def test_kernels_compile_for_each_architecture(kernel, capability, tmp_path):
    for dtype, rest in ((torch.float32, 0), (torch.bfloat16, 7)):
        (launch,) = launches(kernel, dtype, 256, 256 * 40 + rest)
        binary = compiled(launch, capability)
        assert binary.asm["cubin"][:4] == b"\x7fELF"
        assert f".target sm_{capability}" in binary.asm["ptx"]
        assert "atom." not in binary.asm["ptx"]
        assert "red.global" not in binary.asm["ptx"]
        registers, *spilled = resources(binary, tmp_path / "kernel.cubin")
        assert spilled == [0, 0]
        # Four programs of 128 threads on each multiprocessor hide the latency of its memory.
        assert registers <= 65536 // (4 * 128), registers


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_moves_128_bits_at_a_time_and_fuses_nothing(dtype):
    (launch,) = launches("reduce", dtype, 256, 256 * 40)
    ptx = compiled(launch, 90).asm["ptx"]
    counts = accesses(ptx)
    wide, narrow = wide_and_narrow(counts, "ld")
    assert wide >= 16
    assert narrow == counts["ld", 64] <= wide
    assert wide_and_narrow(counts, "st") == (4, 0)
    assert "fma" not in ptx
    assert ".ftz" not in ptx
    if dtype.is_floating_point:
        # Rounding is stated, so that the assembler may not fuse either.
        kind = "f64" if dtype == torch.float64 else "f32"
        assert set(re.findall(r"\b(?:add|mul)[\w.]*f\d\d", ptx)) == {
            f"add.rn.{kind}",
            f"mul.rn.{kind}",
        }


@pytest.mark.parametrize("kernel", ["mask", "gather", "scatter"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, nightly(torch.float32)])
def test_ragged_tail_leaves_the_whole_blocks_as_fast(kernel, dtype):
    whole, ragged = (
        accesses(compiled(launches(kernel, dtype, 256, length)[0], 90).asm["ptx"])
        for length in (256 * 40, 256 * 40 + 1)
    )
    assert ragged["ld", 128] >= whole["ld", 128]
    assert ragged["st", 128] >= whole["st", 128]
    assert ragged["ld", dtype.itemsize * 8] > 0


@pytest.mark.parametrize(
    ("dtype", "dim", "bits"),
    [
        (torch.float32, 256, 128),
        (torch.bfloat16, 256, 128),
        (torch.float32, 300, 128),
        (torch.float16, 100, 64),
        nightly(torch.float64, 256, 128),
        nightly(torch.int32, 64, 128),
        nightly(torch.float32, 4096, 128),
        nightly(torch.bfloat16, 768, 128),
    ],
)
@pytest.mark.parametrize("kernel", ["mask", "gather", "scatter"])
def test_blocks_are_moved_as_wide_as_their_address_allows(kernel, dtype, dim, bits):
    (launch,) = launches(kernel, dtype, dim, dim * 40)
    counts = accesses(compiled(launch, 90).asm["ptx"])
    loads, narrow_loads = wide_and_narrow(counts, "ld", bits)
    stores, narrow_stores = wide_and_narrow(counts, "st", bits)
    assert loads >= 4
    if kernel == "mask":
        assert narrow_loads == 0
        # Blocks of -0.0 are rewritten; nothing else is stored but the bits.
        assert stores == (loads if dtype.is_floating_point else 0)
        assert narrow_stores == counts["st", 8] >= 1
    else:
        assert bits == 64 or stores == loads  # the index counts as loads of 64 bits
        # Loads of the 64-bit index are what is left; on these rows rest the addresses.
        assert narrow_loads == (0 if bits == 64 else counts["ld", 64])
        assert narrow_stores == 0


@every_kernel
def test_lengths_do_not_make_a_kernel_compile_anew(kernel):
    sizes = [(256 * n, 256) for n in (1, 16, 17)] if kernel != "reduce" else [(256, 256)]
    keys = set()
    for numel, block in sizes:
        (launch,) = launches(kernel, torch.float32, block, numel)
        program = launch.program
        backend = make_backend(GPUTarget("cuda", 90, 32))
        bind = create_function_from_signature(program.signature, program.params, backend)
        keys.add(str(bind(*launch.arguments, **launch.options)[1:]))
    assert len(keys) == 1
