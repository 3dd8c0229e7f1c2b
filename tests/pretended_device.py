"""What would a GPU refuse, and where would the host wait for it? Pretended ones, `cuda:0` and on, where there is none.

A tensor there is a wrapper around one on the CPU, which does the arithmetic. As on a real one, tensors of two devices
do not mix, and NumPy cannot read it. Every place where the host would wait for the device is counted, by the line of
ours that made it wait: values that are fetched, sizes that only the device knows, and copies from ordinary memory (from
pinned memory they go on their own). It says nothing about speed, memory, low precision or the kernels of a real one.

    with pretended_device() as device:
        model = load_model(folder, "cuda:0")
        with device.counted() as waits: ...

Name the index: a bare "cuda" asks the driver. All that is patched is put back at the end.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import loopscope
from loopscope.models import checkpoint

_ROOT = str(Path(loopscope.__file__).parent)
_COPIES = ("aten::_to_copy", "aten::copy_")
_MIXING = (*_COPIES, "aten::index.Tensor", "aten::index_put")
"""What takes tensors of two devices on a real one, too."""
_WAITING = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
)


class PretendedTensor(Tensor):
    """On a GPU, as far as anybody can tell."""

    inner: Tensor
    where: torch.device

    @staticmethod
    def __new__(cls, inner: Tensor, where: torch.device) -> "PretendedTensor":
        with torch.inference_mode(False):  # one kind for all: a view that is born in inference mode has no base there
            made: PretendedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device="meta"
            )
        made.inner, made.where = inner, where
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: self.where)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{self.inner!r} on {self.where}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def pin_memory(self, device: object = None) -> Tensor:
        raise RuntimeError("only a tensor on the CPU can be pinned")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendedDevice.here.run(func, args, kwargs or {})


class PretendedDevice(TorchDispatchMode):
    """What runs on it and what goes there; it counts the waits."""

    here: "PretendedDevice"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, PyTorch imports all of it

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.current = 0  # the number of the device that a bare `cuda` means
        self.latest = torch.device("cuda", 0)  # on which something was done

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """The waits of what runs inside: how often, by what and line."""
        self.waits = Counter()
        yield self.waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_there(kwargs.get("device")) or any(isinstance(leaf, PretendedTensor) for leaf in _tensors(args)):
            return self.run(func, args, kwargs)
        return func(*args, **kwargs)

    def run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """One operation: refused, or counted and done on the CPU; one that is made of others, by these."""
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        name, leaves = func.name(), list(_tensors((*args, *kwargs.values())))
        if name.startswith("aten::_fused_sdp_choice"):
            return 0  # attention in plain operations, which are differentiated one by one
        devices = {leaf.where for leaf in leaves if isinstance(leaf, PretendedTensor)}
        there = bool(devices)
        on_cpu = [leaf for leaf in leaves if not isinstance(leaf, PretendedTensor)]
        goes = there if kwargs.get("device") is None else _is_there(kwargs["device"])
        target_is_there = isinstance(args[0], PretendedTensor) if name.startswith("aten::copy_") else goes
        if len(devices) > 1 and not name.startswith(_COPIES):
            raise RuntimeError(f"{name} has tensors of several devices, at {_line()}")
        if there and any(leaf.dim() for leaf in on_cpu) and not name.startswith(_MIXING):
            raise RuntimeError(f"{name} has tensors of {min(devices, key=str)} and of the CPU, at {_line()}")
        if there and name.startswith("aten::index.Tensor") and not isinstance(args[0], PretendedTensor):
            raise RuntimeError(f"a tensor of the CPU is indexed by one of {min(devices, key=str)}, at {_line()}")
        if name.startswith(_COPIES):
            self._count_copy(args, kwargs, there, bool(on_cpu), target_is_there)
        elif there:
            self._count_operation(name, args, kwargs, on_cpu)
        plain, options = _mapped(_unwrapped, args), {key: _mapped(_unwrapped, value) for key, value in kwargs.items()}
        if options.get("device") is not None:
            options["device"] = torch.device("cpu")
        result = func(*plain, **options)
        if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
            return args[0] if func._schema.returns else None  # in place
        return _mapped(partial(_wrapped, where=self._target(kwargs.get("device"), devices)), result) if goes else result

    def _target(self, device: Any, devices: set[torch.device]) -> torch.device:
        """Where a result goes: to the device that is named, or to that of the tensors that it is made of."""
        named = None if device is None else torch.device(device)
        if named is None or named.type == "meta":
            self.latest = next(iter(devices), self.latest)
        else:
            self.latest = torch.device("cuda", self.current if named.index is None else named.index)
        return self.latest

    def _count_copy(
        self, args: Any, kwargs: Mapping[str, Any], there: bool, on_cpu: bool, target_is_there: bool
    ) -> None:
        if there and not target_is_there:
            self._wait("fetch")
        elif on_cpu and target_is_there:
            source = args[-1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
            pinned = getattr(source, "pretended_pinned", False) and kwargs.get("non_blocking", False)
            if not pinned:
                self._wait("copy from ordinary memory")

    def _count_operation(self, name: str, args: Any, kwargs: Mapping[str, Any], on_cpu: list[Tensor]) -> None:
        if name.startswith(_WAITING):
            self._wait(name)
        elif name.startswith("aten::repeat_interleave") and kwargs.get("output_size") is None:
            self._wait("repeat_interleave without output_size")
        elif name.startswith(("aten::index.Tensor", "aten::index_put")):
            if any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]):
                self._wait("index by a mask")
            if any(index is leaf for leaf in on_cpu if leaf.dim() for index in args[1]):
                self._wait("index from ordinary memory")

    def _wait(self, what: str) -> None:
        self.waits[f"{what}, {_line()}"] += 1


@contextmanager
def pretended_device(count: int = 1) -> Iterator[PretendedDevice]:
    """From here on there are so many GPUs in this process, and afterwards there is none."""
    make_tensor = torch.tensor

    def tensor(*values: Any, device: Any = None, **options: Any) -> Tensor:
        made = make_tensor(*values, **options)
        return made if device is None else made.to(device)

    def pinned(self: Tensor, device: object = None) -> Tensor:
        copy = self.clone()
        copy.pretended_pinned = True  # type: ignore[attr-defined]
        return copy

    class Opened:
        """A file of tensors that go to the device as they are read."""

        def __init__(self, file: Path, framework: str, device: str) -> None:
            self._device, self._file = torch.device(device), safe_open(file, framework=framework, device="cpu")

        def __enter__(self) -> "Opened":
            self._tensors = self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_tensor(self, name: str) -> Tensor:
            return self._tensors.get_tensor(name).to(self._device)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tensors, name)

    def set_device(device: Any) -> None:
        here.current = torch.device(device).index or 0

    PretendedDevice.here = here = PretendedDevice()
    answers = {
        "_lazy_init": None,
        "is_available": True,
        "is_bf16_supported": True,
        "device_count": count,
        "synchronize": None,
        "manual_seed_all": None,
        "empty_cache": None,
        "mem_get_info": (1 << 34, 1 << 34),
    }
    with pytest.MonkeyPatch.context() as patch, PretendedDevice.here as device:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        patch.setattr(torch.cuda, "current_device", lambda: here.current)
        patch.setattr(torch.cuda, "set_device", set_device)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(Tensor, "pin_memory", pinned)
        patch.setattr(checkpoint, "safe_open", Opened)
        yield device


def _line() -> str:
    """The innermost line of the package that is running, not that of the function by which all of it uploads."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_ROOT) and not name.endswith("models/device.py"):
            return f"{name.removeprefix(_ROOT + '/')}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _is_there(device: Any) -> bool:
    """PyTorch itself takes the tensors there for tensors on `meta`, and makes new ones like them."""
    return device is not None and torch.device(device).type in ("cuda", "meta")


def _tensors(values: Any) -> Iterator[Tensor]:
    """Those among arguments, which may be lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, each) for each in value)
    return function(value)


def _unwrapped(value: Any) -> Any:
    return value.inner if isinstance(value, PretendedTensor) else value


def _wrapped(value: Any, where: torch.device) -> Any:
    return PretendedTensor(value, where) if isinstance(value, Tensor) else value
