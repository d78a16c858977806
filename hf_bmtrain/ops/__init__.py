"""Device operations: each a contract, a torch reference and a CUDA launch, picked by `tensor.is_cuda`."""
