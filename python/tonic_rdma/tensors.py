"""Tensors between processes without a call for each: slots, named tensors, and regions.

One process makes a slot: `Device("0.0.0.0:50052").dynamic_receiver("gradients")`. Another sends arrays to it:
`Device().channel("ps0:50052").dynamic_sender("gradients").send(array)`.
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
