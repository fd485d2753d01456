"""Argument checks that every operation's wrapper makes, and the error they raise."""

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KernelArgumentError(ValueError):
    """A caller passed a tensor that the operation does not take: a defect in pdmesh, not in a request."""


def require(condition: bool, operation: str, message: str) -> None:
    """Raise KernelArgumentError unless `condition`."""
    if not condition:
        raise KernelArgumentError(f"{operation}: {message}")


def require_float(operation: str, name: str, tensor: torch.Tensor, num_dimensions: int) -> None:
    """Check that `tensor` is a floating tensor of that rank with its last dimension contiguous."""
    if tensor.dim() != num_dimensions:
        raise KernelArgumentError(f"{operation}: {name} must have {num_dimensions} dimensions, has {tensor.dim()}")
    if tensor.dtype not in FLOAT_DTYPES:
        raise KernelArgumentError(f"{operation}: {name} must be float32, bfloat16 or float16, is {tensor.dtype}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise KernelArgumentError(f"{operation}: {name} must be contiguous in its last dimension")


def require_shape(operation: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Check that `tensor` has exactly that shape."""
    if tensor.shape != shape:
        raise KernelArgumentError(f"{operation}: {name} must be {list(shape)}, is {list(tensor.shape)}")


def require_same_dtype(operation: str, **tensors: torch.Tensor) -> None:
    """Check that all tensors, given by name, share dtype and device."""
    (first_name, first), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise KernelArgumentError(
                f"{operation}: {name} is {tensor.dtype} on {tensor.device}, {first_name} {first.dtype} on {first.device}"
            )
