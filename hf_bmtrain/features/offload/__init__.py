"""Adam with its state in page-locked host memory; the update runs on the GPU.

Files: `optimizer` contains AdamOffloadOptimizer. `slabs` allocates the state in host memory and cuts it into chunks.
`device_update` copies the chunks to the GPU, updates them there and copies them back. `delta` computes the mean and
variance of a step's update divided by the learning rate, for inspection.
"""
