"""What both launchers need to know about dtypes."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

KINDS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# fp8 travels as bytes: its codes are made and read with integer arithmetic, on every architecture.
STORAGE = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16, "int8": tl.int8, "fp8": tl.uint8}


def raw(state: Tensor) -> Tensor:
    """The state as a tensor of a dtype that kernels take."""
    return state.view(torch.uint8) if state.dtype == torch.float8_e4m3fn else state


def in_words(state: Tensor) -> bool:
    """Whether the rows of an 8-bit state may be read as 4-byte words."""
    return state.data_ptr() % 4 == 0 and state.stride(0) % 4 == 0


def operand_dtype(inputs: torch.dtype) -> tl.dtype:
    """Dtype of the operands of matrix products; bf16 products are exact, and wider inputs lose nothing to TF32x3."""
    return tl.bfloat16 if inputs == torch.bfloat16 else tl.float32


@functools.cache
def architecture(device: torch.device) -> int:
    """Compute capability of the device as ``10 * major + minor``; 0 where kernels may not hold PTX.

    That is under the interpreter and on AMD's cards.
    """
    if triton.knobs.runtime.interpret or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
