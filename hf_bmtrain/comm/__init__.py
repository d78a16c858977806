"""Transfers of flat tensors between ranks: collectives, copies between the GPUs of one host, layouts and storage."""
