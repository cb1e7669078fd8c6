"""CUDA text on a processor: the few words of CUDA that it has, defined for a C++ compiler.

Each thread of a block is a context of its own; one runs until it waits for others, at a barrier or
an exchange, then the next one does, forwards or backwards. A kernel whose threads do not wait for
each other where they must gives another result in the other order.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path

import torch

from fxkit.lower.building import toolchain
from fxkit.lower.codegen.cuda.printer import scratch_bytes
from fxkit.lower.loop_ir.loop_ir import Kernel

_SHIM = r"""
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <functional>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads, blocks)
#define __shared__ static
#define FX_LAUNCH(kernel, across, down, threads, stream, ...) \
  shim_launch(across, down, threads, [=] { kernel(__VA_ARGS__); })
#define FX_DEVICE(number) (void)(number)
#define FX_ERROR() shim_error()
static int shim_failures = 0;
static int shim_error() {
  const bool has_failed = shim_failures > 0;
  shim_failures = 0;
  return has_failed ? 710 : 0;
}
extern "C" void __assertfail(const char*, const char*, unsigned, const char*, size_t) {
  ++shim_failures;
}
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Shim3 { unsigned x, y, z; };
static Shim3 threadIdx, blockIdx, gridDim, blockDim;
static inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
static inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
static inline long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
static inline double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }

struct ShimBarrier { int size, arrived; long turn; };
struct ShimThread { ucontext_t context; bool is_done; };
static const int SHIM_STACK = 64 * 1024;
static ShimThread shim_threads[1024];
static ShimBarrier shim_block, shim_warps[32];
static char* shim_stacks;
static char shim_slots[1024][8];
static ucontext_t shim_main;
static std::function<void()> shim_body;
static long shim_progress;
extern "C" int shim_is_backward = 0;
extern "C" long shim_launches = 0;

static void shim_enter() {
  shim_body();
  shim_threads[threadIdx.x].is_done = true;
  ++shim_progress;
  swapcontext(&shim_threads[threadIdx.x].context, &shim_main);
}
static void shim_wait(ShimBarrier& barrier) {
  const int me = threadIdx.x;
  const long turn = barrier.turn;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.turn;
    ++shim_progress;
  }
  while (barrier.turn == turn) swapcontext(&shim_threads[me].context, &shim_main);
}
static void __syncthreads() { shim_wait(shim_block); }
template <class T> static T __shfl_xor_sync(unsigned, T x, int distance) {
  const int me = threadIdx.x;
  memcpy(shim_slots[me], &x, sizeof(T));
  shim_wait(shim_warps[me / 32]);
  T other;
  memcpy(&other, shim_slots[me ^ distance], sizeof(T));
  shim_wait(shim_warps[me / 32]);
  return other;
}
template <class T> static T shim_from(T x, int from) {
  const int me = threadIdx.x;
  memcpy(shim_slots[me], &x, sizeof(T));
  shim_wait(shim_warps[me / 32]);
  T other;
  memcpy(&other, shim_slots[from], sizeof(T));
  shim_wait(shim_warps[me / 32]);
  return other;
}
template <class T> static T __shfl_up_sync(unsigned, T x, int distance, int width) {
  const int me = threadIdx.x;
  return shim_from(x, me % width < distance ? me : me - distance);
}
template <class T> static T __shfl_sync(unsigned, T x, int lane, int width) {
  const int me = threadIdx.x;
  return shim_from(x, me / width * width + lane);
}
static void shim_run_block(int threads) {
  shim_block = {threads, 0, 0};
  for (int w = 0; w < threads / 32; ++w) shim_warps[w] = {32, 0, 0};
  for (int k = 0; k < threads; ++k) {
    ShimThread& one = shim_threads[k];
    one.is_done = false;
    getcontext(&one.context);
    one.context.uc_stack.ss_sp = shim_stacks + (long)k * SHIM_STACK;
    one.context.uc_stack.ss_size = SHIM_STACK;
    one.context.uc_link = nullptr;
    makecontext(&one.context, shim_enter, 0);
  }
  for (int left = threads; left > 0;) {
    const long before = shim_progress;
    for (int k = 0; k < threads; ++k) {
      const int me = shim_is_backward ? threads - 1 - k : k;
      if (shim_threads[me].is_done) continue;
      threadIdx.x = me;
      swapcontext(&shim_main, &shim_threads[me].context);
      left -= shim_threads[me].is_done;
    }
    if (left > 0 && before == shim_progress) {
      fprintf(stderr, "expected threads that go on, got ones that wait for each other\n");
      abort();
    }
  }
}
static void shim_launch(int across, int down, int threads, std::function<void()> body) {
  if (!shim_stacks) shim_stacks = (char*)malloc(1024L * SHIM_STACK);
  shim_body = body;
  ++shim_launches;
  gridDim = {(unsigned)across, (unsigned)down, 1};
  blockDim = {(unsigned)threads, 1, 1};
  for (int y = 0; y < down; ++y) {
    for (int x = 0; x < across; ++x) {
      const int place = shim_is_backward ? across - 1 - x : x;
      blockIdx = {(unsigned)place, (unsigned)y, 0};
      shim_run_block(threads);
    }
  }
}
"""

_FLAGS = (
    "-std=c++20 -shared -fPIC -ffp-contract=off -fwrapv -fno-strict-aliasing -Wno-unknown-pragmas"
).split()

# What surrounds each output in memory, and must be left alone.
_FENCE = 64
_MARK = 0x5A


def build_on_cpu(text: str, folder: Path, level: str = "-O1") -> ctypes.CDLL:
    """Compile CUDA text with the C++ compiler, as far optimised as said, and load it."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    source, built = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(_SHIM + text)
    command = [toolchain.current().compiler, *_FLAGS, level, str(source), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(built))


def run_on_cpu(
    library: ctypes.CDLL,
    name: str,
    kernel: Kernel,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    *,
    is_backward: bool = False,
    shift: int = 0,
) -> list[torch.Tensor]:
    """Launch a kernel.

    Args:
        library: Holds the kernel.
        name: Its name there.
        kernel: Its loop IR.
        inputs: Its inputs.
        outputs: Tensors of the layouts of its outputs; they are not written.
        is_backward: Whether threads and blocks run from the last to the first.
        shift: Bytes by which outputs miss a multiple of sixteen.

    Raises:
        RuntimeError: When an index is out of bounds; on a GPU a later call raises it.

    Returns:
        What it wrote, in the layouts of `outputs`.
    """
    ctypes.c_int.in_dll(library, "shim_is_backward").value = int(is_backward)
    memory = [_fenced(tensor, shift) for tensor in outputs]
    starts = [_start(m, shift) for m in memory]
    addresses = [t.data_ptr() for t in inputs]
    addresses += [m.data_ptr() + at for m, at in zip(memory, starts, strict=True)]
    scratch = torch.empty(scratch_bytes(kernel) + 16, dtype=torch.uint8)
    launch = getattr(library, name)
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    place = ctypes.c_void_p((scratch.data_ptr() + 15) // 16 * 16)
    error = launch(pointers, place, None, 0)
    if error:
        raise RuntimeError(f"CUDA error {error}: device-side assert triggered")
    return [_read(m, at, t) for m, at, t in zip(memory, starts, outputs, strict=True)]


def _span(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _fenced(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    count = _span(tensor) + shift + 2 * _FENCE + 16
    return torch.full((count,), _MARK, dtype=torch.uint8)


def _start(memory: torch.Tensor, shift: int) -> int:
    return _FENCE + -(memory.data_ptr() + _FENCE) % 16 + shift


def _read(memory: torch.Tensor, start: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return what was written, and see that nothing around it was."""
    span = _span(tensor)
    around = torch.cat([memory[:start], memory[start + span :]])
    assert (around == _MARK).all(), "written outside of the output"
    flat = memory[start : start + span].clone().view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())
