"""How does a CPU multiply few tokens with a large matrix? With packed weights: PyTorch would pack them in every call.

If a measurement shows that it is faster on this machine, `pack_weights` rearranges every large matrix into oneDNN's own
order, once. Up to about eight tokens then take little longer than one. A packed model only answers: it is saved, hashed
and copied like the plain model, and training rejects it.

`quantise_weights` rounds the matrices to int8. This is a different precision, and a different model.

Other matrices stay unchanged, and their products with few tokens are transposed.

Shapes: M tokens, K inputs, N outputs.
"""

import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.errors import UserError

MAX_TURNED = 64
"""Tokens up to which the product the other way round was measured: on two threads and 16 shapes (192 to 49,152 outputs
of 256 to 5,632 inputs) it took 0.1 to 1.1 of PyTorch's time up to eight tokens, and 0.6 to 1.2 beyond; for matrices of
256 and 704 columns up to 1.4."""
MAX_TURNED_ON_ONE_THREAD = 3
MIN_WIDE = 1024
"""Inputs from which on sixteen columns take less time than six to eight, of a matrix that is not much taller; from
twice as many on, one thread is faster at a product with a vector."""
MIN_PACKED = 1 << 18
"""A matrix with at least so many numbers is tried packed."""
MAX_PACKED_SHARE = 0.95
"""A matrix is packed if its products then take at most this share of the plain time."""
_PACKED_FOR = 8
_FEWEST, MIN_FILLED_UP = 4, 1 << 20
"""Tokens that one and two are filled up to: the library's own way with those takes up to 1.4 times as long, of matrices
of at least so many numbers, which are read from memory."""
_MEASURED_TOKENS = (1, 4, 8)
_TURNS = 4
_multiply: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
_outside: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""Layers whose weights the compiler does not read, by number: each is one operator of a compiled graph."""
_faster: dict[tuple[Any, ...], bool] = {}
"""The measurements of this process, by shape, precision and number of threads."""


class Linear(nn.Linear):
    """Compute nn.Linear, also for few tokens on a CPU; in training and in compiled graphs it is nn.Linear itself.

    A linear layer of PyTorch computes x W^T. For one token that is a product with a vector, which the library's kernel
    runs on one thread; for two to about a dozen it packs the whole matrix first, every time, which takes longer than to
    read it. The product W x^T of at least two columns does neither. It is the same sum of the same products up to
    rounding. Some numbers of columns take up to twice as long as the next multiple of eight, so tokens are filled up to
    that. Of packed weights there is one product for all numbers of tokens.
    """

    number: int | None = None
    """The layer's number in a compiled graph, set by `keep_outside`."""

    @property
    def is_packed(self) -> bool:
        return self.weight.is_mkldnn

    def pack(self) -> None:
        """Put the weights into the order in which oneDNN reads them, in place of the plain matrix."""
        packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PACKED_FOR)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def unpack(self) -> None:
        """Put the plain matrix back, bit for bit."""
        if self.is_packed:
            self.weight = nn.Parameter(self.weight.to_dense(), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]"""
        if torch.compiler.is_compiling() and self.number is not None:
            return _linear_outside(input, self.number, self.out_features)
        weight = self.weight
        if weight.is_mkldnn:
            return self._packed_product(input, weight)
        if torch.compiler.is_compiling() or self.training or torch.is_grad_enabled() or not self._few(input):
            return super().forward(input)
        columns = self._filled_up(input).t()
        if self.bias is None:
            product = torch.mm(self.weight, columns)
        else:
            product = torch.addmm(self.bias[:, None], self.weight, columns)
        return product[:, : len(input)].t().contiguous()  # so that the next layer can transpose it back

    def train(self, mode: bool = True) -> "Linear":
        """Reject training of packed weights: an optimizer would change what no product reads."""
        if mode and self.is_packed:
            raise _untrainable()
        super().train(mode)
        return self

    def _packed_product(self, input: Tensor, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
            raise _untrainable()
        tokens = input.shape[0]
        if tokens >= _FEWEST or input.dim() != 2 or weight.numel() < MIN_FILLED_UP:
            if input.numel():
                return _multiply(input, weight, self.bias, "none", [], "")
            return input.new_empty((*input.shape[:-1], self.out_features))
        return _multiply(F.pad(input, (0, 0, 0, _FEWEST - tokens)), weight, self.bias, "none", [], "")[:tokens]

    def _filled_up(self, input: Tensor) -> Tensor:
        """[.., K] with additional rows, as many as make the product faster."""
        tokens = len(input)
        if tokens == 1:
            return torch.cat((input, input))
        if tokens > 8:
            missing = -tokens % 8
        else:
            wide = self.in_features >= MIN_WIDE and self.out_features <= 4 * self.in_features
            missing = 16 - tokens if tokens > 5 and wide else 0
        return F.pad(input, (0, 0, 0, missing)) if missing else input.contiguous()

    def _few(self, input: Tensor) -> bool:
        """Whether these are few tokens [M, K] on a CPU in single precision; other cases have their own kernels."""
        if type(self.weight) is not nn.Parameter:  # another kind of weight, such as quantised weights
            return False
        if input.dim() != 2 or input.device.type != "cpu" or not input.dtype == self.weight.dtype == torch.float32:
            return False
        if torch.get_num_threads() == 1:
            return (1 if self.in_features < 2 * MIN_WIDE else 2) <= len(input) <= MAX_TURNED_ON_ONE_THREAD
        return 0 < len(input) <= MAX_TURNED

    def __getstate__(self) -> dict[str, Any]:
        """Copy or pickle the plain matrix."""
        state = dict(self.__dict__)
        if self.is_packed:
            state["_parameters"] = dict(state["_parameters"], weight=nn.Parameter(self.weight.to_dense(), False))
        return state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Linear":
        """Move or convert the plain matrix, not the packed one."""
        self.unpack()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_packed:
            destination[f"{prefix}weight"] = self.weight.to_dense()

    def _load_from_state_dict(self, *given: Any, **options: Any) -> None:
        self.unpack()
        super()._load_from_state_dict(*given, **options)


class Int8Linear(nn.Module):
    """Compute a linear layer with int8 weights on a CPU: a scale for every output, and for every token's inputs.

    oneDNN multiplies int8 with int8 and sums without rounding. Since no two tokens share a scale, a token's product is
    the same, bit for bit, whichever tokens come with it.
    """

    weight: Tensor  # [N, K] int8, in the order in which oneDNN reads it
    scales: Tensor  # [N]
    bias: Tensor | None
    number: int | None = None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach().float()
        rounded, scales = _rounded_rows(weight)
        self.register_buffer("weight", _pack_int8(rounded))
        self.register_buffer("scales", scales[:, 0])
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().float())
        self.eval()

    @property
    def plain_weight(self) -> Tensor:
        return self.weight.to_dense().t().contiguous()

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]"""
        if torch.compiler.is_compiling() and self.number is not None:
            return _linear_outside(input, self.number, self.out_features)
        if torch.is_grad_enabled() and input.requires_grad:
            raise _untrainable_int8()
        if not input.numel():
            return input.new_empty((*input.shape[:-1], self.out_features))
        rounded, scales = _rounded_rows(input.reshape(-1, self.in_features))
        product = _int8_product(rounded, self.weight, self.scales)
        product = product.mul_(scales) if self.bias is None else torch.addcmul(self.bias, product, scales)
        return product.view(*input.shape[:-1], self.out_features)

    def train(self, mode: bool = True) -> "Int8Linear":
        """Reject training of rounded weights."""
        if mode:
            raise _untrainable_int8()
        super().train(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copy or pickle the plain matrix."""
        return dict(self.__dict__, _buffers=dict(self._buffers, weight=self.plain_weight))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight = _pack_int8(self.weight)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.plain_weight


def keep_outside(model: nn.Module) -> None:
    """Make every layer with packed or int8 weights one operator of the graph, if the model is compiled."""
    for layer in model.modules():
        if isinstance(layer, Int8Linear) or (isinstance(layer, Linear) and layer.is_packed):
            layer.number = id(layer)
            _outside[layer.number] = layer


@torch.library.custom_op("loopscope::linear", mutates_args=())
def _linear_outside(input: Tensor, number: int, outputs: int) -> Tensor:
    """Run a layer with packed or int8 weights as one operator of a compiled graph."""
    product: Tensor = _outside[number](input)
    return product


@_linear_outside.register_fake
def _(input: Tensor, number: int, outputs: int) -> Tensor:
    """The shape of this operator's output, for the compiler."""
    return input.new_empty((*input.shape[:-1], outputs))


def _rounded_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [R, K] to int8, with the scale [R, 1] of every row."""
    scales = rows.abs().amax(1, keepdim=True).div_(127).clamp_min_(torch.finfo(rows.dtype).tiny)
    return (rows / scales).round_().to(torch.int8), scales


def _int8_product(inputs: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """int8 inputs [R, K] by packed weights [N, K] -> float32 [R, N].

    oneDNN gets the inputs as unsigned numbers around 128: with signed ones it takes a way that is hundreds of times
    slower on CPUs without AMX.
    """
    unsigned = inputs.view(torch.uint8).bitwise_xor(128)  # adds 128
    options: Any = (torch.zeros(1, dtype=torch.int32), None, 1.0, 0, torch.float32, "none", [], "")
    product: Tensor = torch.ops.onednn.qlinear_pointwise(unsigned, 1.0, 128, packed, scales, *options)
    return product


@cache
def _int8_is_exact() -> bool:
    """Whether this CPU sums int8 products without rounding: CPUs without VNNI saturate."""
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((_int8_product(largest, _pack_int8(largest), torch.ones(64)) == 64 * 127 * 127).all())


def _pack_int8(weight: Tensor) -> Tensor:
    """Pack int8 weights into oneDNN's order."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, [_PACKED_FOR, weight.shape[1]])
    return packed


def _untrainable_int8() -> UserError:
    """The error for training int8 weights."""
    return UserError("int8 weights cannot be trained; load the model in another precision (--dtype float32).")


def _untrainable() -> UserError:
    """The error for training packed weights."""
    return UserError(
        "The weights are packed for inference, and cannot be trained; load the model with load_model(..., pack=False)."
    )


@torch.no_grad()
def quantise_weights(model: nn.Module) -> None:
    """Replace the matrices of linear layers by int8, one after the other; all other weights become float32.

    A matrix that is tied to another (a head tied to its embedding) stays unchanged, since its rows are read.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise UserError("int8 weights need oneDNN, which this build of PyTorch lacks; take --dtype bfloat16.")
    if not _int8_is_exact():
        raise UserError("int8 weights need a CPU with VNNI instructions; take --dtype bfloat16.")
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    layers = [
        (module, name)
        for module in model.modules()
        for name, layer in module.named_children()
        if isinstance(layer, Linear) and uses[id(layer.weight)] == 1
    ]
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layers for int8 weights: those are of Ouro, Huginn and looped decoders; "
            "take float32."
        )
    for module, name in layers:
        setattr(module, name, Int8Linear(getattr(module, name)))
    model.float()


@torch.no_grad()
def pack_weights(model: nn.Module, measure: bool = True) -> int:
    """Pack the matrices of linear layers on a CPU, in place, if that makes products of few tokens faster.

    A matrix that is tied to another (a head tied to its embedding) stays unchanged, since its rows are read. Each shape
    is measured once in a process. Without `measure`, all other matrices are packed. Returns the number of packed
    matrices.
    """
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for layer in model.modules():
        if isinstance(layer, Linear) and uses[id(layer.weight)] == 1 and _can_be_packed(layer.weight):
            if not measure:
                layer.pack()
            elif layer.weight.numel() >= MIN_PACKED and not layer.training:
                _pack_if_faster(layer)
    return sum(isinstance(layer, Linear) and layer.is_packed for layer in model.modules())


def _can_be_packed(weight: Tensor) -> bool:
    """Whether oneDNN can pack a matrix on this device, in this precision."""
    if weight.device.type != "cpu" or weight.is_mkldnn or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _pack_if_faster(layer: Linear) -> None:
    """Pack a linear layer's matrix, unless a measurement shows that it is slower."""
    key = (*layer.weight.shape, layer.weight.dtype, torch.get_num_threads())
    plain = layer.weight
    if _faster.get(key, True):
        layer.pack()
    if key not in _faster:
        _faster[key] = _time_share(layer, plain) <= MAX_PACKED_SHARE
        if not _faster[key]:
            layer.weight = plain


def _time_share(layer: Linear, plain: Tensor) -> float:
    """The time of products of few tokens with packed weights, relative to plain weights; the least of several tries."""
    packed, shares = layer.weight, []
    for tokens in _MEASURED_TOKENS:
        given = torch.ones(tokens, layer.in_features, dtype=plain.dtype)
        least = [float("inf"), float("inf")]
        for _ in range(_TURNS + 1):
            for place, weight in enumerate((packed, plain)):
                layer.weight = weight
                began = time.perf_counter()
                layer(given)
                least[place] = min(least[place], time.perf_counter() - began)
        shares.append(least[0] / least[1])
    layer.weight = packed
    return sum(shares) / len(shares)
