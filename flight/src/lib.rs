//! Arrow Flight over tonic-rdma: record batches that are used where they arrived.
//!
//! [Arrow Flight] is a gRPC protocol for record batches. In stock implementations each batch is copied some
//! six times on its way: by the encoder, by tonic's codec, into and out of the socket, into tonic's buffer,
//! and once more because the batch then lies at a wrong address. Here it is copied twice: [`BatchEncoder`]
//! puts the batch's buffers side by side into registered memory, and the receiver's device reads this memory
//! into registered memory of the receiver, so that the body begins at a multiple of 64 bytes. The arrays of
//! the decoded batch are slices of that memory.
//!
//! ```text
//!  RecordBatch ─ BatchEncoder ─▶ FlightData.data_body     one copy, into a Pool::for_sending
//!                                     │  GatherCodec: by reference
//!                                     ▼
//!                                native call              one READ of the receiver's device, 64-byte aligned
//!                                     │  GatherCodec: a slice
//!                                     ▼
//!  RecordBatch ◀─ BatchStream ── FlightData.data_body     no copy
//! ```
//!
//! The messages, the service trait and the decoder are those of the package `arrow-flight`, so a service that
//! exists needs one line: [`FlightServer`] in place of `FlightServiceServer`. Stock clients and servers are
//! peers like any others: with them the batches go over HTTP/2, and are copied as stock Flight copies them.
//!
//! - [`FlightClient`]: `do_get`, `do_put` and `do_exchange` with record batches.
//! - [`FlightServer`]: serves a `FlightService`.
//! - [`BatchEncoder`], [`EncodedBatches`]: batches to messages.
//! - [`BatchStream`]: messages to batches; [`Placement`] says what was copied.
//!
//! The example `flight` of this package is a whole program. The bench `flight` measures against stock Flight
//! over TCP.
//!
//! [Arrow Flight]: https://arrow.apache.org/docs/format/Flight.html
#![forbid(unsafe_code)]

mod client;
mod decode;
mod encode;
mod server;

pub use client::{FlightClient, PutResults};
pub use decode::{ALIGNMENT, BatchStream, Placement};
pub use encode::{BatchEncoder, EncodedBatches};
pub use server::FlightServer;
