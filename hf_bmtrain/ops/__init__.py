"""Operations on one device: each has a contract, a torch reference and a CUDA launch, chosen by `tensor.is_cuda`."""
