"""Tensors between processes without a call for each: slots, named tensors, and regions.

    device = tonic_rdma.tensors.Device("0.0.0.0:50052")
    gradients = device.dynamic_receiver("gradients")       # in one process
    channel = device.channel("ps0:50052")                  # in another
    channel.dynamic_sender("gradients").send(array)
"""

from tonic_rdma._tensors import (
    Device,
    DynamicReceiver,
    DynamicSender,
    ExportedRegion,
    RemoteRegion,
    Sent,
    SentCounts,
    StaticReceiver,
    StaticSender,
    TensorChannel,
)

__all__ = [
    "Device",
    "DynamicReceiver",
    "DynamicSender",
    "ExportedRegion",
    "RemoteRegion",
    "Sent",
    "SentCounts",
    "StaticReceiver",
    "StaticSender",
    "TensorChannel",
]
