"""Operations on flat tensors: contract, float32 reference, CUDA launch."""
