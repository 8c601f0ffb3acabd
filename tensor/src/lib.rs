//! Tensors between processes by one-sided RDMA operations, for programs that speak gRPC.
//!
//! A process is a device with memory, and one RDMA operation moves a tensor from one process to another (Xue
//! et al., *Fast Distributed Deep Learning over RDMA*, EuroSys 2019; § in these pages means a section of that
//! paper). No call carries the tensor. gRPC remains for control: devices use gRPC to find one another's
//! memory, on the port that also serves other calls.
//!
//! ```text
//!  RdmaDevice ── listens, owns memory, knows what is on offer under which name
//!     │ channel("ps0:50052", 0)
//!     ▼
//!  Channel ──┬─ StaticSender        a tensor of known shape, into a buffer of the receiver              (§3.2)
//!            ├─ DynamicSender       a tensor of any shape: its metadata, by which the peer reads it    (§3.3)
//!            ├─ request(name, step) a tensor that the peer offers under a name
//!            └─ write, read         any bytes of a region that the peer has exported
//! ```
//!
//! # Install
//!
//! ```toml
//! [dependencies]
//! tonic-rdma-tensor = { git = "https://github.com/tonic-rdma/tonic-rdma" }
//! tokio = { version = "1", features = ["macros", "rt-multi-thread"] }
//! ```
//!
//! The software device, which moves tensors between processes of one host, is always there. The
//! [features](#features) add network cards, TLS, and conversions.
//!
//! # When to use it
//!
//! Use this crate if both sides are yours, tensors move again and again, and a call for each tensor costs too
//! much. It needs RDMA between the two sides: the software device within a host, a network card between
//! hosts. There is no fallback to TCP: [`RdmaDevice::channel`] fails with [`TensorErrorKind::NoRdma`]. For
//! peers that may have no RDMA, send messages with [`gather`](tonic_rdma::gather).
//!
//! | | the sender knows | costs | the receiver learns of it by |
//! |---|---|---|---|
//! | static slot: [`RdmaDevice::static_receiver`], [`Channel::static_sender`] | type and shape | one WRITE | a word in memory |
//! | dynamic slot: [`RdmaDevice::dynamic_receiver`], [`Channel::dynamic_sender`] | nothing | a WRITE of 168 bytes, and a READ by the receiver | a word in memory |
//! | named tensor: [`RdmaDevice::put`], [`Channel::request`] | nothing | a message and a WRITE; one more message in the first step, and when the shape changes | a message |
//! | region: [`RdmaDevice::export`], [`Channel::region`], [`Channel::write`], [`Channel::read`] | the offsets | one operation, also for thousands of blocks ([`RegionWrite::blocks_from`]) | a notice, or not at all |
//! | buffer by reference: [`BufferPool::share`](buffer::BufferPool::share), [`RemoteBuffer::fetch`](buffer::RemoteBuffer::fetch) | nothing: the reader fetches | a call and a READ; also over TCP | a handle in a message |
//! | published region: [`RdmaDevice::publish`], [`Channel::view`] | the offsets | stores to its own memory | a load from the sender's memory, on the software device |
//!
//! # Static slots
//!
//! A static slot is the fastest way. The receiver finds the tensor by polling its own memory
//! ([`StaticReceiver::try_recv`]), or sleeps until the tensor is there ([`StaticReceiver::recv`]). The region
//! that is sent moves into the future of [`StaticSender::send_region`], which gives it back, also in its
//! error.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec};
//!
//! let spec = TensorSpec::new(Dtype::F32, Shape::new(&[1024, 1000])?)?;
//!
//! // The parameter server: a slot with one buffer for worker 0's gradients.
//! let server = RdmaDevice::bind("127.0.0.1:0").await?;
//! let mut gradients = server.static_receiver("worker0/fc8", &spec, 1)?;
//!
//! // The worker.
//! let worker = RdmaDevice::bind("127.0.0.1:0").await?;
//! let channel = worker.channel(&server.endpoint(), 0).await?;
//! let mut fc8 = channel.static_sender("worker0/fc8", &spec).await?;
//! let mut region = worker.allocate(4 * 1024 * 1000)?;
//! for step in 1..=3 {
//!     region.fill(step);
//!     region = fc8.send_region(region).await?; // when the region comes back, the tensor is there
//!
//!     // At the server:
//!     let arrived = gradients.recv().await?;
//!     arrived.for_each_chunk(|bytes| assert!(bytes.iter().all(|&byte| byte == step)));
//!     drop(arrived); // frees the buffer for the next tensor
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A thread that has a core of its own needs no futures: [`StaticReceiver::try_recv`] and
//! [`StaticSender::is_ready`] look at memory, [`StaticSender::try_send_region`] begins to send, and
//! [`Channel::poll`] takes completions.
//!
//! # Dynamic slots
//!
//! A dynamic slot accepts tensors of any type and shape, also tensors of strings and transposed ones.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use tonic_rdma_tensor::{RdmaDevice, Shape, Tensor};
//! # let server = RdmaDevice::bind("127.0.0.1:0").await?;
//! # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
//! # let channel = worker.channel(&server.endpoint(), 0).await?;
//! let mut slot = server.dynamic_receiver("tokens", 4)?;
//! let mut sender = channel.dynamic_sender("tokens").await?;
//! let words = Tensor::from_strings(Shape::new(&[2])?, ["remote", "memory"])?;
//! sender.send(&words).await?;
//! let arrived = slot.recv().await?;
//! assert_eq!(arrived.strings()?.collect::<Vec<_>>(), ["remote", "memory"]);
//! # Ok(())
//! # }
//! ```
//!
//! # Named tensors
//!
//! A named tensor needs no slot. Tensors are offered and requested by name and step, in either order, and an
//! offer says for how many readers it is.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use tonic_rdma_tensor::{Dtype, NamedOffer, RdmaDevice, NamedReply, Shape, Tensor, TensorSpec};
//! # let server = RdmaDevice::bind("127.0.0.1:0").await?;
//! # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
//! # let channel = worker.channel(&server.endpoint(), 0).await?;
//! # let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4])?)?;
//! # let tensor = Tensor::copy_from(spec, &[1, 2, 3, 4])?;
//! let request = channel.request("loss", 17);
//! server.put("loss", 17, NamedOffer::Tensor(tensor), 1)?; // for one reader
//! match request.await? {
//!     NamedReply::Tensor(tensor) => assert_eq!(tensor.as_slice::<u8>()?, [1, 2, 3, 4]),
//!     NamedReply::Dead => unreachable!("it was computed"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Regions
//!
//! A region is memory that peers read and write at any offset.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use tonic_rdma_tensor::{RdmaDevice, Rights};
//! # let server = RdmaDevice::bind("127.0.0.1:0").await?;
//! # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
//! # let channel = worker.channel(&server.endpoint(), 0).await?;
//! let cache = server.export("cache", server.allocate(1 << 20)?, Rights::READ_WRITE)?;
//! let remote = channel.region("cache").await?;
//! let mut block = worker.allocate(4096)?;
//! block.fill(9);
//! let block = channel.write(&remote).at(8192).from(block, ..).await?;
//! # drop(block);
//! let mut first = [0; 1];
//! cache.memory().copy_out(8192, &mut first)?;
//! assert_eq!(first, [9]);
//! # Ok(())
//! # }
//! ```
//!
//! [`RdmaDevice::publish`] offers a region for reading only, and its owner keeps it as a `&mut [u8]`. Where
//! the software device maps memory of the peer (both processes belong to one user), [`Channel::view`] maps
//! the peer's region into this process. Reading a word of the peer then costs one load. A view is read like
//! shared memory: the owner stores the bytes of a message, then a word with Release ordering; the reader
//! polls the word, then copies the bytes. On other devices there is no view, and [`RegionWrite::bytes`] sends
//! small messages inline.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use tonic_rdma_tensor::{RdmaDevice, Rights};
//! # let server = RdmaDevice::bind("127.0.0.1:0").await?;
//! # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
//! # let channel = worker.channel(&server.endpoint(), 0).await?;
//! let board = server.export("board", server.allocate(4096)?, Rights::READ)?;
//! let remote = channel.region("board").await?;
//! if let Some(view) = channel.view(&remote).await? {
//!     board.memory().copy_in(8, b"message")?;
//!     board.memory().store_u64(0, 1)?; // message 1 is there
//!
//!     let mut message = [0; 7];
//!     while view.load_u64(0)? < 1 {}
//!     view.copy_out(8, &mut message)?;
//!     assert_eq!(&message, b"message");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Tensors
//!
//! [`TensorMut`] and [`Tensor`] are the tensors. They come from and go to arrays of ndarray, files of the
//! safetensors format and DLPack, without a copy where their memory allows that: see [`convert`].
//!
//! # Safety, without `unsafe`
//!
//! Memory that a device may touch ([`MemRegion`]) moves into the operation, and comes back with its result.
//! Dropping the future does not end the operation, so the memory stays with the device until the operation
//! has ended. Memory that peers may touch ([`SharedRegion`]) is read by copying, or after the rights of the
//! peers were revoked. A right covers exactly the intended bytes, and belongs to one peer. This crate has no
//! unsafe code; all of it is in the crate tonic-rdma-verbs.
//!
//! # Costs
//!
//! - A link to a peer has a protection domain, as many queue pairs as [`DeviceBuilder::queue_pairs_per_peer`]
//!   says, and one gRPC call that stays open as a sign of life. Memory that is used with several peers is
//!   registered for each peer.
//! - Tensors outside registered memory are copied once before they are sent. [`RdmaDevice::allocate`] and
//!   [`Pool::for_sending`](tonic_rdma_verbs::memory::Pool::for_sending) return registered memory.
//! - A receiver that reads a static slot copies the bytes through the first-level cache
//!   ([`Arrived::for_each_chunk`]), because the peer could change them.
//! - The software device copies on the processor that receives: in a poll of a queue or of a slot. If no
//!   thread polls, the device's own thread copies after 4 to 8 ms.
//! - An operation of more than [`DeviceBuilder::max_request_bytes`] becomes several requests.
//!
//! # Limits
//!
//! - A link serves 16 384 slots and regions at a time. One counts until both sides have let it go: the sender
//!   or remote region at one side, and the receiver or exported region at the other. A slot has one sender at
//!   a time, and at most 1024 buffers.
//! - A region that is exported for one request must not be dropped before the peer's operations on it have
//!   ended: an operation on a region that is gone ends the link.
//! - A link ends when the peer's process dies, breaks the protocol, or shuts its runtime down. Operations
//!   then return [`TensorErrorKind::PeerLost`] or another error, and memory comes back with the error. A
//!   tensor that arrived in part is never shown.
//! - No device encrypts tensors. A device refuses links to peers that are reached over TLS, until
//!   [`DeviceBuilder::plaintext_tensors`] allows such links.
//! - Memory of [`RdmaDevice::allocate`], of slots and of tensors that arrive counts against
//!   `RDMA_PINNED_LIMIT`.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `ibverbs` | network cards: RoCE, InfiniBand and iWARP |
//! | `ndarray` | tensors from and to arrays of ndarray |
//! | `safetensors` | tensors from and to files of the safetensors format |
//! | `tls-ring`, `tls-aws-lc` | TLS for the calls by which devices find one another: `DeviceBuilder::client_tls`, `server_tls` |
//!
//! The book's page on tensors has the measurements and the design.
#![forbid(unsafe_code)]

mod bootstrap;
pub mod buffer;
mod channel;
mod control;
pub mod convert;
mod device;
mod error;
mod link;
mod memory;
mod named;
mod named_driver;
mod reduce;
mod regions;
mod slots;
mod types;
mod wire;

pub mod unstable;

pub use channel::Channel;
pub use channel::copy::{BlockCopy, Memcpy, RegionRead, RegionWrite};
pub use device::{DeviceBuilder, RdmaDevice};
pub use error::{TensorError, TensorErrorKind, TransferError};
pub use link::words::Notification;
pub use named::OfferCounts;
pub use named_driver::{NamedOffer, NamedReply, NamedRequest};
pub use reduce::{reduce_max, reduce_max_f32, reduce_max_f64};
pub use regions::{ExportedRegion, PublishedRegion, RemoteRegion, Rights};
pub use slots::dynamic_slot::{DynamicReceiver, DynamicSender};
pub use slots::sender::{SentCounts, SentTensors};
pub use slots::static_slot::{Arrived, StaticReceiver, StaticSender};
pub use types::{Dtype, Element, Metadata, MetadataLayout, Shape, Strides, Tensor, TensorMut, TensorSpec};

/// A region of a peer that this process has mapped for reading, from [`Channel::view`].
///
/// A peer that stores the bytes of a message, and then a word with release semantics
/// ([`SharedRegion::store_u64`]), shows the whole message to a reader that [loads](RegionView::load_u64) the
/// new word. Regions begin at a multiple of 4096, if they are not parts of other regions. The memory counts
/// against the peer's `RDMA_PINNED_LIMIT` until the last view of it is dropped.
#[doc(inline)]
pub use tonic_rdma_verbs::RemoteView as RegionView;
pub use tonic_rdma_verbs::memory::{MemRegion, SharedRegion};
pub use tonic_rdma_verbs::{VerbsError, VerbsErrorKind};
