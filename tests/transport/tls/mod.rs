//! TLS over the RDMA stream, and the certificates that a service sees. The tests make their certificates as
//! they run.

mod balance;
mod failures;
mod greeting;
mod identity;
mod transport;
