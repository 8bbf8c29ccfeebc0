# SPDX-License-Identifier: Apache-2.0
"""A GPU that is none: tensors on the host that say they are on it, its streams, and a record.

What the host would wait for on a real one is recorded: values that are read, sizes that depend on
values, copies that are not asynchronous. A tensor of the host that meets one of the GPU is an
error, as it would be there. Nothing is asynchronous in truth.
"""

import contextlib
import threading
import traceback

import torch
from torch.overrides import TorchFunctionMode

from wavemare.comm import kernels, triton_kernels
from wavemare.comm.kernels import BlockKernels

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
WAITING = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique"),
    *("unique_consecutive", "masked_select", "equal", "_unique2", "_unique_consecutive"),
}
MIXING = {"copy_", "to", "cpu", "_to_copy", "__get__", "__setitem__", "__getitem__", "pin_memory"}


class Record:
    """What happened: waits of the host by thread, launches of kernels, tensors kept for streams."""

    def __init__(self):
        self.waits, self.launches, self.kept, self.inserted = [], [], [], None

    def wait(self, what):
        frames = [f for f in traceback.extract_stack() if "/comm/" in f.filename]
        where = f"{frames[-1].name}:{frames[-1].lineno}" if frames else "caller"
        self.waits.append((threading.current_thread().name, what, where))

    def of(self, thread):
        return [what for name, what, _ in self.waits if name.startswith(thread)]

    def clear(self):
        self.waits.clear()
        self.launches.clear()
        self.kept.clear()


RECORD = Record()


class GpuTensor(torch.Tensor):
    """Memory of the host that says it is the GPU's."""

    device = property(lambda self: GPU)
    is_cuda, is_cpu = property(lambda self: True), property(lambda self: False)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def record_stream(self, stream):
        RECORD.kept.append((tuple(self.shape), stream.name))


class Pinned(torch.Tensor):
    """Memory of the host that the GPU may read and write while the host goes on."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def is_pinned(self):
        return True


class _Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def plain(value):
    """Return an argument with tensors and devices as torch knows them here."""
    if isinstance(value, torch.Tensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, torch.device) or value in ("cuda", "cuda:0"):
        return HOST
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else value
    return value


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


def run(function, args, kwargs):
    """Do what torch would do, and record whether the host would wait."""
    name = getattr(function, "__name__", "")
    if function is torch.device:
        return function(*args, **kwargs)
    given = list(tensors((args, kwargs)))
    on_gpu = any(isinstance(tensor, GpuTensor) for tensor in given)
    wanted = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.device)]
    wanted += [GPU for v in (*args, *kwargs.values()) if isinstance(v, str) and "cuda" in v]
    pins = kwargs.pop("pin_memory", False) or name == "pin_memory"
    with torch._C.DisableTorchFunctionSubclass():
        _observe(name, args, kwargs, given, wanted)
        if name == "pin_memory":
            result = plain(args[0]).clone()
        elif name == "cpu":
            result = plain(args[0]).clone() if on_gpu else args[0]
        elif name == "to" and wanted and (wanted[0].type == "cuda") != on_gpu:
            result = torch.Tensor.to(*map(plain, args), **{**_plain(kwargs), "copy": True})
        else:
            result = function(*map(plain, args), **_plain(kwargs))
        if name in {"numpy", "__dlpack__"} and on_gpu:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        device = (wanted[0] if wanted else GPU if on_gpu else HOST) if name != "cpu" else HOST
        return _placed(result, device, pins, given)


def _plain(kwargs):
    return {key: plain(value) for key, value in kwargs.items()}


def _observe(name, args, kwargs, given, wanted):
    kinds = {isinstance(tensor, GpuTensor) for tensor in given if tensor.dim()}
    if len(kinds) == 2 and name not in MIXING:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    on_gpu = any(isinstance(tensor, GpuTensor) for tensor in given)
    masks = any(t.dtype in (torch.bool, torch.uint8) for t in given[1:])
    if on_gpu and (name in WAITING or name == "cpu" or (name == "__getitem__" and masks)):
        RECORD.wait(name)
    source, target = None, None
    if name == "copy_":
        source, target = args[1], isinstance(args[0], GpuTensor)
    elif name == "to" and wanted:
        source, target = args[0], wanted[0].type == "cuda"
    if source is None or isinstance(source, GpuTensor) == target:
        return
    on_host = args[0] if name == "copy_" and not target else source
    pinned = isinstance(on_host, Pinned)
    if not (kwargs.get("non_blocking") and pinned) and source.numel():
        RECORD.wait(("up" if target else "down") + ("" if pinned else ", not pinned"))


def _placed(result, device, pins, given):
    if isinstance(result, torch.Tensor):
        shares = any(
            isinstance(t, Pinned) and _memory(t) == _memory(result) for t in given if t.numel()
        )
        kind = GpuTensor if device.type == "cuda" else Pinned if pins or shares else torch.Tensor
        return result.as_subclass(kind)
    if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
        kind = list if isinstance(result, list) else tuple
        return kind(_placed(each, device, pins, given) for each in result)
    return result


def _memory(tensor):
    return tensor.as_subclass(torch.Tensor).untyped_storage().data_ptr()


class Stream:
    """A stream whose work is done at once."""

    def __init__(self, device=None, name=None):
        self.name = name or threading.current_thread().name
        self.waited_for = []

    def wait_event(self, event):
        self.waited_for.append(event)

    def wait_stream(self, stream):
        self.waited_for.append(stream)

    def record_event(self):
        return Event()

    def synchronize(self):
        RECORD.wait("synchronize")


class Event:
    """An event; `GpuRuns` says that the GPU has not come to it."""

    running = False

    def __init__(self, enable_timing=False):
        pass

    def record(self, stream=None):
        pass

    def query(self):
        return not Event.running

    def elapsed_time(self, end):
        return 1.0

    def synchronize(self):
        RECORD.wait("synchronize")


class Kernels(BlockKernels):
    """The kernels of the host on memory that says it is the GPU's, and the number of launches."""

    def mask(self, *arguments):
        self._launch("mask", *arguments)

    def gather(self, *arguments):
        self._launch("gather", *arguments)

    def scatter(self, *arguments):
        self._launch("scatter", *arguments)

    def reduce(self, *arguments):
        self._launch("reduce", *arguments)

    def _launch(self, name, *arguments):
        given = [value for value in arguments if isinstance(value, torch.Tensor)]
        assert all(isinstance(tensor, GpuTensor) for tensor in given), name
        RECORD.launches.append(name)
        if RECORD.inserted is not None:
            RECORD.inserted(given[0])
        getattr(super(), name)(*map(plain, arguments))


_state = threading.local()


def current_stream(device=None):
    return getattr(_state, "stream", None) or Stream(name="main")


@contextlib.contextmanager
def on_stream(stream):
    before, _state.stream = current_stream(), stream
    with _Mode():
        yield
    _state.stream = before


def install():
    """Let this process believe that it has a GPU; only tensors made in `on_stream` are on it."""
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: RECORD.launches.append(f"set_device {device}")
    cuda.Stream, cuda.Event = Stream, Event
    cuda.stream, cuda.current_stream = on_stream, current_stream
    triton_kernels.TritonKernels = Kernels
    kernels.kernels_for.cache_clear()


def upload(tensor):
    """Return a copy on the GPU, without a record."""
    return tensor.clone().as_subclass(GpuTensor)


def download(tensor):
    return tensor.as_subclass(torch.Tensor)
