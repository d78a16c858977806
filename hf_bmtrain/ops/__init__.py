"""Device operations: for each a contract, a float32 torch reference and a CUDA launch, picked by `tensor.is_cuda`."""
