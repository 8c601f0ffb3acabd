//! Memory by reference: a message carries a handle of some 80 bytes, and its reader fetches the bytes.
//!
//! An owner shares memory of its [`BufferPool`], and gets a [`BufferLease`] and a [`RemoteBuffer`]. The lease
//! stays with the owner: the bytes are there as long as the lease. The handle is a message of protocol
//! buffers. It goes into a field of any message, to any process, which may pass it on. Whoever has it fetches
//! the bytes when it wants them, all of them or ranges, into memory of its own choice.
//!
//! ```text
//!  owner                          gateway                        reader
//!  BufferPool::share ─▶ lease
//!        └─▶ RemoteBuffer ──call──▶ passes it on ──call──▶ buffer.fetch()
//!  BufferService ◀──────────────────────── Fetch ──────────────┤
//!  memory of the lease ─── READ by the reader's device, or a stream over TCP ──▶ Bytes
//! ```
//!
//! # Owner and reader
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tonic_rdma::{RdmaIncoming, RdmaServer};
//! use tonic_rdma_tensor::buffer::{BufferPool, RemoteBuffer};
//!
//! // The owner: a pool whose service is on the port that the pool names.
//! let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
//! let pool = BufferPool::new(format!("http://{}", incoming.local_addr()))?;
//! tokio::spawn(RdmaServer::new().add_service(pool.service()).serve_with_incoming(incoming));
//! let mut image = pool.allocate(1 << 20)?;
//! image.fill(7);
//! let (lease, handle): (_, RemoteBuffer) = pool.share(image.freeze())?; // no copy
//!
//! // Any process that gets the handle.
//! let bytes = handle.fetch().await?;
//! assert!(bytes.len() == 1 << 20 && bytes.iter().all(|&byte| byte == 7));
//! let mut row = [0; 4096];
//! handle.fetch_into(&mut row, 8192..12288).await?;
//!
//! // Without the lease, the handle is of no use.
//! drop(lease);
//! let error = handle.fetch().await.unwrap_err();
//! assert_eq!(error.kind(), tonic_rdma_tensor::TensorErrorKind::Gone);
//! # Ok(())
//! # }
//! ```
//!
//! # A field of your own messages
//!
//! The package has the proto, in its folder `proto`. Your proto imports it, and your build script names the
//! type of this module:
//!
//! ```text
//! import "tonic_rdma/buffer.proto";
//! message Image { string name = 1; tonic_rdma.buffer.v1.RemoteBuffer pixels = 2; }
//!
//! tonic_prost_build::configure().extern_path(".tonic_rdma.buffer.v1", "::tonic_rdma_tensor::buffer").compile_fds(descriptors)?;
//! ```
//!
//! # Which path the bytes take
//!
//! | the reader | path |
//! |---|---|
//! | is the process of the owner | none: the [`Bytes`](bytes::Bytes) of the lease, without a copy |
//! | reaches an [`RdmaServer`](tonic_rdma::RdmaServer) of the owner by a device | the reader's device READs the owner's memory, into registered memory that becomes `Bytes` |
//! | reaches it by HTTP/2 | a stream of messages, over RDMA or TCP |
//!
//! The path is decided once for each owner, when the first handle of this owner is fetched, and
//! [`BufferClient::owners`] has the verdict and its reason. API and errors are the same on each path. A client
//! keeps one connection to an owner for all handles, and closes it when it was not used for a minute.
//!
//! # How long a handle is valid
//!
//! | what happened | error of a fetch |
//! |---|---|
//! | the lease was dropped, its [time](LeaseOptions::time_limit) is over, or all its [readers](LeaseOptions::readers) have read | [`Gone`](crate::TensorErrorKind::Gone) |
//! | the owner called [`BufferLease::revoke`] | [`Revoked`](crate::TensorErrorKind::Revoked) |
//! | another process, or another pool, is at the owner's address | [`Restarted`](crate::TensorErrorKind::Restarted) |
//! | nothing is there, or it went away in the middle | [`PeerLost`](crate::TensorErrorKind::PeerLost) |
//! | the owner does not go on | [`Timeout`](crate::TensorErrorKind::Timeout) |
//! | the token is wrong, or the buffer is for [other readers](LeaseOptions::only_for) | [`NotPermitted`](crate::TensorErrorKind::NotPermitted) |
//!
//! A fetch never returns bytes of another buffer, nor bytes from before a [write](RemoteBuffer::write_back)
//! that had ended when the fetch began. Memory of a lease is used again only when no fetch reads it any more,
//! also after the lease was dropped or revoked. A fetch that runs when the lease ends either has all its bytes,
//! or fails.
//!
//! # Who may read
//!
//! The handle has a token of 128 random bits. Who has the handle may read, and write if the lease is
//! [writable](LeaseOptions::writable). So a handle is a secret: its `Debug` does not show the token. A lease
//! that is shared [for named readers](LeaseOptions::only_for) needs a second secret, which the owner gives to
//! each reader ([`BufferPool::admit`]).
//!
//! Two things bound what a secret is worth. On a connection without TLS, whoever reads the network reads
//! tokens and bytes. And a reader that has fetched from memory of a pool by its device can read the whole slab
//! that the memory lies in, as the peer of any native call can
//! ([`CallConfig::send_in_place`](tonic_rdma::CallConfig::send_in_place)): give tenants pools of their own, or
//! switch `send_in_place` off at the owner's server, at the price of a copy for each fetch.
//!
//! A handle names the address that the reader connects to. A reader that gets handles from strangers limits
//! these addresses: [`BufferClientBuilder::owners`].

mod client;
mod lease;
mod owner;
pub(crate) mod proto;
mod service;
mod table;

use std::fmt;
use std::ops::Range;

use bytes::Bytes;

use crate::error::{TensorError, TensorErrorKind};
use crate::types::{Shape, Tensor, TensorSpec};

pub use self::client::{BufferClient, BufferClientBuilder, OwnerStatus};
pub use self::lease::{BufferLease, LeaseOptions, ReaderStatus};
pub use self::owner::{BufferPool, BufferPoolBuilder, BufferPoolStatistics, ReaderSecret};
pub use self::proto::RemoteBuffer;
pub use self::service::BufferService;

use self::proto::{BufferKey, Fault, FaultKind, Reader};

/// Most ranges of one request.
const MOST_RANGES: usize = 1 << 16;
/// Bytes of a token, and of the secret of a reader.
const SECRET: usize = 16;

impl RemoteBuffer {
    /// Fetches all bytes, with the default client of this runtime ([`BufferClient::of_runtime`]).
    ///
    /// # Errors
    /// See [the table](self#how-long-a-handle-is-valid). The buffer is also longer than the client accepts
    /// ([`BufferClientBuilder::max_fetch_bytes`]), or its checksum is wrong ([`TensorErrorKind::Protocol`]).
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn fetch(&self) -> Result<Bytes, TensorError> {
        BufferClient::of_runtime().fetch(self).await
    }

    /// Fetches all bytes as the tensor that was shared.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch), and the handle names no type and shape, or others than its length.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn fetch_tensor(&self) -> Result<Tensor, TensorError> {
        BufferClient::of_runtime().fetch_tensor(self).await
    }

    /// Fetches `range`, in bytes, into `destination`, which has its length: a [`MemRegion`](crate::MemRegion),
    /// or any other memory.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch), and the lengths differ. `destination` has parts of the bytes then.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn fetch_into(&self, destination: &mut [u8], range: Range<u64>) -> Result<(), TensorError> {
        BufferClient::of_runtime().fetch_into(self, destination, range).await
    }

    /// Fetches many ranges, in bytes, by one call.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch).
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn fetch_blocks(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, TensorError> {
        BufferClient::of_runtime().fetch_blocks(self, ranges).await
    }

    /// Writes `bytes` into the owner's buffer, from `offset` on. Later fetches see all of them; fetches that
    /// run see none.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch), and the lease is not [writable](LeaseOptions::writable). After
    /// [`TensorErrorKind::PeerLost`] and [`TensorErrorKind::Timeout`], the bytes may have been written.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn write_back(&self, offset: u64, bytes: impl Into<Bytes>) -> Result<(), TensorError> {
        BufferClient::of_runtime().write_back(self, offset, bytes).await
    }

    /// Returns type and shape of the tensor, or `None` if the buffer has other bytes.
    ///
    /// # Errors
    /// The handle names a type or a shape that is none, or they don't have the length of the buffer.
    pub fn spec(&self) -> Result<Option<TensorSpec>, TensorError> {
        if self.dtype.is_empty() && self.shape.is_empty() {
            return Ok(None);
        }
        let spec = TensorSpec::new(self.dtype.parse()?, Shape::new(&self.shape)?)?;
        if spec.bytes() != Some(self.length) {
            return Err(TensorError::argument(format!("a buffer of {} bytes for {spec}", self.length)));
        }
        Ok(Some(spec))
    }

    fn key(&self) -> BufferKey {
        let Self { incarnation, id, generation, ref token, .. } = *self;
        BufferKey { incarnation, id, generation, token: token.clone() }
    }
}

impl fmt::Debug for RemoteBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, incarnation, id, generation, length, token: _, dtype, shape, xxh3 } = self;
        f.debug_struct("RemoteBuffer")
            .field("owner", owner)
            .field("incarnation", &format_args!("{incarnation:#x}"))
            .field("id", id)
            .field("generation", generation)
            .field("length", length)
            .field("dtype", dtype)
            .field("shape", shape)
            .field("xxh3", xxh3)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for BufferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferKey({:#x}, {}, {})", self.incarnation, self.id, self.generation)
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reader({:?})", self.name)
    }
}

/// Why an owner does not serve a request. Readers of its process get it as it is, others by a message.
#[derive(Debug)]
struct Refusal {
    kind: FaultKind,
    reason: String,
}

impl Refusal {
    fn new(kind: FaultKind, reason: impl Into<String>) -> Self {
        Self { kind, reason: reason.into() }
    }

    fn into_fault(self, buffer: u32) -> Fault {
        Fault { buffer, kind: self.kind.into(), reason: self.reason }
    }

    /// Returns the error of the reader.
    fn into_error(self, owner: &str) -> TensorError {
        let kind = match self.kind {
            FaultKind::Gone => TensorErrorKind::Gone,
            FaultKind::Revoked => TensorErrorKind::Revoked,
            FaultKind::Restarted => TensorErrorKind::Restarted,
            FaultKind::NotPermitted => TensorErrorKind::NotPermitted,
            FaultKind::Busy => TensorErrorKind::Busy,
            FaultKind::OutOfRange => TensorErrorKind::InvalidArgument,
            FaultKind::NoMemory => TensorErrorKind::NoMemory,
            FaultKind::Unspecified => TensorErrorKind::Refused,
        };
        TensorError::of_owner(kind, owner, &self.reason)
    }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Self { kind: fault.kind(), reason: fault.reason }
    }
}
