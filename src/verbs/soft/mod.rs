//! The software RDMA device.
