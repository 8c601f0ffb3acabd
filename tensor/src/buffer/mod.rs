//! Memory by reference: a message carries a handle of some 80 bytes, and its reader fetches the bytes.
//!
//! An owner shares memory of its [`BufferPool`], and gets a [`BufferLease`] and a [`RemoteBuffer`]. The lease
//! stays with the owner: the bytes are there as long as the lease. The handle is a message of protocol
//! buffers. It goes into a field of any message, to any process, which may pass it on. Its holder fetches
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
//! keeps one connection to an owner for all handles, and closes it when it was not used for one to two minutes.
//!
//! # How long a handle is valid
//!
//! | what happened | error of a fetch |
//! |---|---|
//! | the lease was dropped, its [time](LeaseOptions::time_limit) is over, or all its [readers](LeaseOptions::readers) have read | [`Gone`](crate::TensorErrorKind::Gone) |
//! | the owner called [`BufferLease::revoke`] | [`Revoked`](crate::TensorErrorKind::Revoked) |
//! | another process, pool or server is at the owner's address | [`Restarted`](crate::TensorErrorKind::Restarted) |
//! | nothing is there, or it went away in the middle | [`PeerLost`](crate::TensorErrorKind::PeerLost) |
//! | the owner sends nothing for the client's [timeout](BufferClientBuilder::timeout) | [`Timeout`](crate::TensorErrorKind::Timeout) |
//! | the token is wrong, or the buffer is for [other readers](LeaseOptions::only_for) | [`NotPermitted`](crate::TensorErrorKind::NotPermitted) |
//!
//! A fetch never returns bytes of another buffer, nor bytes from before a [write](RemoteBuffer::write_back)
//! that had ended when the fetch began. Memory of a lease is used again only when no fetch reads it any more,
//! also after the lease was dropped or revoked. A fetch that runs when the lease ends either gets all its bytes,
//! because the last ones were handed to the transport before, or fails. A reader that stops to read holds this
//! memory until its call or its connection ends ([`CallConfig::timeout`](tonic_rdma::CallConfig::timeout)).
//! 4096 other leases may end before a handle of a revoked lease says `Gone`.
//!
//! # Who may read
//!
//! The handle has a token of 128 random bits. Who has the handle may read, and write if the lease is
//! [writable](LeaseOptions::writable). So a handle is a secret: its `Debug` does not show the token. A lease
//! that is shared [for named readers](LeaseOptions::only_for) needs a second secret, which the owner gives to
//! each reader ([`BufferPool::admit`]).
//!
//! A secret does not protect against two readers. On a connection without TLS, a reader of the network reads
//! tokens and bytes. A reader that has fetched from memory of a pool by its device can read the whole slab
//! that the memory lies in, as the peer of any native call can
//! ([`CallConfig::send_in_place`](tonic_rdma::CallConfig::send_in_place)): give tenants pools of their own, or
//! switch `send_in_place` off at the owner's server, at the price of a copy for each fetch.
//!
//! A handle names the address that the reader connects to. A reader that gets handles from strangers limits
//! these addresses: [`BufferClientBuilder::owners`].

mod client;
mod handle;
mod lease;
mod owner;
pub(crate) mod proto;
mod service;
mod table;

pub use self::client::{BufferClient, BufferClientBuilder, OwnerStatus};
pub use self::lease::{BufferLease, LeaseOptions, ReaderStatus};
pub use self::owner::{BufferPool, BufferPoolBuilder, BufferPoolStatistics, ReaderSecret};
pub use self::proto::RemoteBuffer;
pub use self::service::BufferService;
