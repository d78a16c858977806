"""Adam with its state in page-locked host memory.

Files: `optimizer` contains AdamOffloadOptimizer. `slabs` allocates the state on the host and cuts it into chunks.
`device_update` copies the chunks to the device, updates them there and copies them back. `delta` computes the mean and
variance of a step's update.
"""
