"""Adam with its state in page-locked host memory.

`optimizer` is AdamOffloadOptimizer. `slabs` allocates the state on the host and cuts it into chunks, `device_update`
copies the chunks to the device, updates them there and copies them back, `delta` has statistics of a step's update.
"""
