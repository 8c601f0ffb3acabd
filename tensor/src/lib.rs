//! The tensor channel: moves tensors from process to process by one-sided RDMA operations, without a call for each.
//!
//! A process is a device with memory, and a tensor gets from one to another by a single one-sided operation (Xue et al.,
//! *Fast Distributed Deep Learning over RDMA*, EuroSys 2019; § here is a section of that paper). gRPC remains for control: over
//! it devices find one another's memory, on the same port as any other call.
//!
//! ```text
//!  RdmaDevice ── listens, owns memory, knows what is offered under which name
//!     │ channel("ps0:50052", 0)
//!     ▼
//!  Channel ──┬─ memcpy, memcpy_batch     any bytes of a region that the peer has exported
//!            ├─ StaticSender             a tensor of known shape, into the buffer that waits for it       (§3.2)
//!            ├─ DynamicSender            a tensor of any shape: its metadata, which the peer then reads by (§3.3)
//!            └─ request(name, step)      whatever a peer offers under a name, by rendezvous
//! ```
//!
//! # When to use it
//!
//! Use it where both ends are yours, tensors move again and again, and a call for each costs too much. It needs RDMA between
//! the two ends (the software device within a host, a network card beyond): there is no fallback to TCP, and
//! [`RdmaDevice::channel`] fails with [`ChannelError::NoRdma`] instead. For peers that may have none, send messages with
//! [`gather`](tonic_rdma::gather).
//!
//! | | the sender knows | costs | the receiver learns of it by |
//! |---|---|---|---|
//! | static slot: [`RdmaDevice::static_receiver`], [`Channel::static_sender`] | type and shape | one WRITE | a word in memory |
//! | dynamic slot: [`RdmaDevice::dynamic_receiver`], [`Channel::dynamic_sender`] | nothing | a WRITE of 168 bytes, and a READ by the receiver | a word in memory |
//! | rendezvous: [`RdmaDevice::put`], [`Channel::request`] | nothing | a message and a WRITE; one more message in the first step, and when the shape changes | a message |
//! | region: [`RdmaDevice::export`], [`Channel::region`], [`Channel::memcpy`] | the offsets | one operation, also for thousands of blocks ([`Channel::memcpy_batch`]) | a notice, or not at all |
//!
//! A **static slot** is the fastest: the receiver finds the tensor by looking at memory that it polls
//! ([`StaticReceiver::try_recv`]), or sleeps until it is there ([`StaticReceiver::recv`]). A **dynamic slot** takes any type
//! and shape, tensors of strings and transposed ones included. A **rendezvous** has no slot: tensors are offered and asked for by
//! name and step, whichever comes first, to as many readers as the offer says. A **region** is for bytes that are no
//! tensor, and for reading what a peer has.
//!
//! # How to use it
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tonic_rdma_tensor::{Dtype, RdmaDevice, Shape, TensorSpec, reduce_max_f32};
//!
//! let spec = TensorSpec::new(Dtype::F32, Shape::new(&[1024, 1000])?)?;
//!
//! // The parameter server: a place for worker 0's gradients, with one buffer.
//! let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
//! let mut gradients = server.static_receiver("worker0/fc8", &spec, 1)?;
//!
//! // The worker.
//! let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
//! let mut fc8 = worker.channel(&server.endpoint(), 0).await?.static_sender("worker0/fc8", &spec).await?;
//! let mut region = worker.allocate(4 * 1024 * 1000)?;
//! for step in 1..=3 {
//!     region.fill(step);
//!     let (back, sent) = fc8.send_region(region).await; // when it comes back, the tensor is there
//!     sent?;
//!     region = back;
//!
//!     // At the server:
//!     let arrived = gradients.recv().await?;
//!     arrived.for_each_piece(|bytes| assert!(bytes.iter().all(|&byte| byte == step)));
//!     drop(arrived); // frees the buffer for the next one
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A thread that has a core to spend needs no futures: [`StaticReceiver::try_recv`] and [`StaticSender::is_ready`] look at
//! memory, [`StaticSender::start`] begins to send, and [`Channel::poll`] takes completions.
//!
//! Tensors are made with [`TensorMut`] and [`Tensor`], and come from and go to arrays of ndarray, files of the safetensors
//! format and DLPack without a copy where their memory allows it: see [`convert`].
//!
//! # Safety, without `unsafe`
//!
//! Memory that a device may touch moves into the operation ([`MemRegion`]) and comes back with it; dropping the future that
//! waits for it changes nothing about that. What peers may touch ([`SharedRegion`]) is read by copying, or after their right
//! was taken away. A right covers exactly the bytes that are meant, and belongs to one peer.
//!
//! # What it costs
//!
//! - A link to a peer has as many queue pairs as [`Settings::new`] says, a protection domain, and one gRPC call that stays
//!   open as a sign of life. Memory that is used with several peers is registered for each of them.
//! - Tensors outside registered memory are copied once before they are sent. [`RdmaDevice::allocate`] and
//!   [`Pool::for_sending`](tonic_rdma_verbs::memory::Pool::for_sending) have such memory.
//! - A receiver that reads a static slot copies its bytes through the first-level cache ([`Arrived::for_each_piece`]), since
//!   the peer could change them.
//! - The software device copies on the processor that sends. Requests are cut at 64 MiB ([`Settings::pieces`]), as the thread
//!   that posts one is busy until it is done.
//!
//! # Limits
//!
//! - A link serves 16 384 slots and regions in its life. A slot has one sender at a time, and at most 1024 buffers.
//! - A link ends when the peer's process dies, breaks the protocol, or its runtime shuts down. Operations then return
//!   [`ChannelError::PeerLost`] or another error; memory comes back with it. Nothing that arrived in part is ever shown.
//! - No device encrypts tensors. Beside TLS a device refuses to make links until [`Settings::plaintext_tensors`] allows it.
//! - Memory of [`RdmaDevice::allocate`], of slots and of tensors that arrive counts against `RDMA_PINNED_LIMIT`.
//!
//! The book's page on tensors has the measurements, and the design.
#![forbid(unsafe_code)]

mod channel;
mod control;
pub mod convert;
mod device;
mod error;
mod exchange;
mod link;
mod lock;
mod memory;
mod name;
mod reduce;
mod regions;
mod rendezvous;
mod slots;
mod types;
mod wire;

#[doc(hidden)]
pub mod internal;

pub use channel::Channel;
pub use channel::copy::{BlockCopy, RegionRead, RegionWrite};
pub use channel::memcpy::Memcpy;
pub use device::RdmaDevice;
pub use device::builder::DeviceBuilder;
pub use error::{Cause, ChannelError, MemcpyError};
pub use exchange::{Offer, Request, Requested};
pub use link::notification::Notification;
pub use reduce::{reduce_max, reduce_max_f32, reduce_max_f64};
pub use regions::exported::ExportedRegion;
pub use regions::remote::RemoteRegion;
pub use regions::rights::Rights;
pub use rendezvous::Held;
pub use slots::dynamic_receiver::DynamicReceiver;
pub use slots::dynamic_sender::DynamicSender;
pub use slots::static_receiver::{Arrived, StaticReceiver};
pub use slots::static_sender::StaticSender;
pub use types::{
    AllocateError, Dtype, Element, ForeignError, Metadata, MetadataLayout, Shape, ShapeError, Strides,
    Tensor, TensorError, TensorMut, TensorSpec, UnknownDtype, deserialize, serialize,
};

pub use tonic_rdma_verbs::memory::{MemRegion, SharedRegion};
