"""Operations on the tensors of one device, and what the package uses of torch's private interface.

Each operation is a contract (shapes, dtypes, aliasing), a reference in torch and a CUDA launch; the public function
chooses between them by `tensor.is_cuda`. Nothing here knows ranks, parameters, modules or optimizers.
"""
