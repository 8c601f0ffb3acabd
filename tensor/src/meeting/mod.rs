//! The meeting of the processes of a job, and their watch over one another: the ranks of a group (`tonic-rdma-collective`), or the parts of
//! a split graph (`tonic-rdma-graph`).
//!
//! ```text
//!  join    a member calls another one. Both must speak one version, and have the same in common: a job, or a graph and its partition. A
//!          caller that fits gets a key, which all its later calls carry.
//!          Ranks know the address of rank 0 alone: they join there, and wait until all have come. The answer has all addresses.
//!          Parts know all addresses: each joins each other one.
//!  watch   a call to each other member stays open, as a sign of life. It says whether that member is ready, has failed or has left, and
//!          what else it has to say, of type `D`.
//! ```
//!
//! A member is called by its noun, `rank` or `part`, and its number. The user of this module serves the [`service`], opens the connections,
//! and decides what the end of a watch means. Nothing here waits on a thread of the caller's runtime.

mod client;
pub mod proto;
mod runtime;
mod seats;
mod service;
mod state;

pub use client::{Joined, StandingStream, endpoint, server};
pub use runtime::OwnRuntime;
pub use seats::{NotJoined, VERSION};
pub use service::service;
pub use state::{Attendee, Details, End, Hall, Key, Meeting, Standing, fresh_key, shortened};
