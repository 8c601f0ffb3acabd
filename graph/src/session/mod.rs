//! The processes of a split graph: they find one another, compare what they run, distribute addresses (§3.4), and watch one another.
//!
//! ```text
//!  Listener::bind ── one port: calls of the parts, tensor device
//!     │ connect(Peering)
//!     │    join      each part calls each other part; they compare graph, partition and modes
//!     │    watch     a call to each other part stays open, as a sign of life; it also says that a part has failed or left
//!     │    attach    each sender learns the addresses of the slots of its receivers, before the first step
//!     │    ready     all parts have done so
//!     ▼
//!  Session::transfers(mode) ── for an executor; one for each mode
//! ```
//!
//! How parts join and watch one another is the meeting of `tonic-rdma-tensor`, which groups of ranks use too.
//!
//! A session has threads of its own. Its methods may be called without a runtime. They must not be called on a thread of a runtime where
//! they wait, which each of them says.
//!
//! # How the modes with calls are set up
//!
//! They are to be as fast as a user of gRPC can make them, because the other modes are compared with them. Each part has one connection
//! to each receiver, with TCP_NODELAY, windows of 16 MiB for a call and 32 MiB for a connection, and frames of 512 KiB, which carried most
//! in measurements. As many calls of each crossing tensor are in flight as the window has steps, and calls of different
//! crossing tensors are in flight together. The thread of the executor only hands a tensor over: other threads encode and send it. A call ends
//! when the tensor has a place at the receiver. The codec is tonic's own.
//!
//! # Who may call
//!
//! A part gives a secret to each caller that runs the same graph, and all later calls carry it. So this service is for networks in which
//! all hosts are trusted, as is usual for training. A call that is malformed, out of order or too long is refused by name, and harms nothing.

mod connect;
mod connected;
mod farewell;
mod fingerprint;
mod links;
mod listener;
mod peering;
mod runs;
mod service;
mod settings;
mod state;
#[cfg(test)]
mod tests;
mod threads;

pub use connected::{Addresses, Session};
pub use fingerprint::Fingerprint;
pub use listener::Listener;
pub use peering::Peering;
pub use settings::Settings;
