"""Operations on the tensors of one device.

Each operation is a contract (shapes, dtypes, aliasing), a reference in torch and a CUDA launch; the public function
chooses between them by `tensor.is_cuda`. Nothing here knows ranks, parameters, modules or optimizers.
"""
