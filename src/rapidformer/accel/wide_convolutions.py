"""Wide convolutions in groups, as products of Fourier transforms.

Wav2Vec2 and its relatives encode positions by a convolution of 128 steps in 16 groups, for which
cuDNN has no fast kernel in 16 bits: on an H200, 16 recordings of ten seconds took 15.1 ms in both
passes, half of a training step, and take 2.2 ms here. The transforms are in fp32, so less is
rounded than in a convolution in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.assembly import Assembly
from rapidformer.compat.torch_compile import is_tracing
from rapidformer.overlay import extend

_LEAST_WIDTH = 64
"""Narrower convolutions have not been timed."""


def apply(assembly: Assembly) -> str | None:
    """Change every wide convolution in groups."""
    count = apply_wide_convolutions(assembly.model)
    return f"{count} as Fourier transforms" if count else None


def apply_wide_convolutions(model: nn.Module) -> int:
    """Do so while they compute in 16 bits; returns how many there are."""
    wide = [m for m in model.modules() if isinstance(m, nn.Conv1d) and _suits(m)]
    for module in wide:
        extend(module, "convolution", _build_convolution, is_shared=True)
    return len(wide)


def _suits(module: nn.Conv1d) -> bool:
    return (
        type(module).forward is nn.Conv1d.forward
        and module.kernel_size[0] >= _LEAST_WIDTH
        and 1 < module.groups < module.in_channels  # depthwise ones have not been timed
        and module.stride == module.dilation == (1,)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def _build_convolution(cls: Any) -> dict[str, Any]:
    def forward(self: nn.Conv1d, values: Tensor) -> Tensor:
        kind = values.device.type
        is_autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_autocast else values.dtype
        padding, width = int(self.padding[0]), self.kernel_size[0]
        # torch.jit.trace makes sizes tensors.
        is_usual = values.dim() == 3 and type(values.shape[-1]) is int
        is_usual = is_usual and values.shape[-1] + 2 * padding >= width
        if dtype.itemsize != 2 or not is_usual or is_tracing():
            plain: Tensor = cls.forward(self, values)
            return plain
        with torch.autocast(kind, enabled=False):
            output = convolve(values, self.weight, padding, self.groups)
            if self.bias is not None:
                output = output + self.bias.float()[:, None]
            return output.to(dtype)

    return {"forward": forward}


def convolve(values: Tensor, weight: Tensor, padding: int, groups: int) -> Tensor:
    """``conv1d`` of [rows, channels, steps] without a bias, in fp32."""
    width, padded = weight.shape[-1], values.shape[-1] + 2 * padding
    length = 1 << (padded - 1).bit_length()  # so that the end does not wrap around to the start
    inputs = torch.fft.rfft(functional.pad(values.float(), (padding, padding)), n=length)
    filters = torch.fft.rfft(weight.float(), n=length).conj().unflatten(0, (groups, -1))
    product = torch.einsum("ngif,goif->ngof", inputs.unflatten(1, (groups, -1)), filters)
    output: Tensor = torch.fft.irfft(product.flatten(1, 2), n=length)
    return output[..., : padded - width + 1]
