"""Arithmetic on the tensors of one device.

Each operation has a public function, whose docstring is its contract (shapes, dtypes, aliasing), a CUDA kernel, and a
reference implementation in torch. The public function launches the kernel for CUDA tensors, and otherwise computes the
same with the reference. Nothing here depends on ranks, parameters, modules or optimizers.
"""
