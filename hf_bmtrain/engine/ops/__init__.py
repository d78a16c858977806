"""Arithmetic on the tensors of one device.

Each operation has a public function, a CUDA kernel, and a reference implementation in torch. The function launches the
kernel for CUDA tensors, and calls the reference implementation for other tensors. The function's docstring specifies
shapes, dtypes and aliasing. Nothing here depends on ranks, parameters, modules or optimizers.
"""
