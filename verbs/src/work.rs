//! Work requests: the requests that can be posted to a queue pair.

use std::io::IoSlice;

use super::{LocalSegment, RemoteSegment};

/// A request for the send queue (`struct ibv_send_wr`).
#[derive(Clone, Copy, Debug)]
pub struct SendRequest<'a> {
    /// Identifier that the completion carries.
    pub wr_id: u64,
    /// The operation.
    pub operation: Operation<'a>,
    /// Whether success is reported. A failure is always reported. A request that is not signalled keeps its place in
    /// the send queue until the next signalled request completes.
    pub signaled: bool,
}

/// The operation of a send request.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    /// Delivers `data` into the next receive that the peer posted.
    Send {
        /// The message.
        data: Payload<'a>,
        /// Immediate data, delivered beside the message.
        immediate: Option<u32>,
    },
    /// Writes `data` into the peer's memory. A write with immediate data also consumes a receive of the peer, but does not
    /// touch the buffer of that receive.
    Write {
        /// The bytes to write.
        data: Payload<'a>,
        /// The destination.
        remote: RemoteSegment,
        /// Immediate data, delivered in the peer's receive completion.
        immediate: Option<u32>,
    },
    /// Reads as many bytes of the peer's memory as `into` holds.
    Read {
        /// The destination segments, in this order.
        into: &'a [LocalSegment],
        /// The source.
        remote: RemoteSegment,
    },
}

/// The source of the bytes of a send or write.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Registered memory. Its content must not change until the request has completed.
    Registered(&'a [LocalSegment]),
    /// Any memory. `post_send` copies the bytes before it returns (`IBV_SEND_INLINE`).
    Inline(&'a [IoSlice<'a>]),
}

impl Payload<'_> {
    /// Returns the length of the payload in bytes.
    pub fn length(&self) -> u64 {
        match self {
            Self::Registered(segments) => segments.iter().map(LocalSegment::length).sum(),
            Self::Inline(slices) => slices.iter().map(|slice| slice.len() as u64).sum(),
        }
    }
}

/// A request for the receive queue (`struct ibv_recv_wr`).
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest<'a> {
    /// Identifier that the completion carries.
    pub wr_id: u64,
    /// The segments that the message fills, in this order.
    pub into: &'a [LocalSegment],
}
