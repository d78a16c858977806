"""The benchmark of training engines: cells, measurements, tables."""
