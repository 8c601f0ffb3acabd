//! Work requests: what can be posted to a queue pair.

use std::io::IoSlice;

use super::{LocalSegment, RemoteSegment};

/// A request for the send queue (`struct ibv_send_wr`).
#[derive(Clone, Copy, Debug)]
pub struct SendRequest<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// What to do.
    pub operation: Operation<'a>,
    /// Whether success is reported. A failure always is. Requests that are not signalled free their place in the send
    /// queue with the next signalled one that completes.
    pub signaled: bool,
}

/// What a send request does.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    /// Delivers `data` into the next receive that the peer posted.
    Send {
        /// The message.
        data: Payload<'a>,
        /// Delivered beside the message.
        immediate: Option<u32>,
    },
    /// Writes `data` into the peer's memory. With immediate data it consumes a receive, whose buffer stays untouched.
    Write {
        /// What to write.
        data: Payload<'a>,
        /// Where.
        remote: RemoteSegment,
        /// Delivered in the peer's receive completion.
        immediate: Option<u32>,
    },
    /// Reads the peer's memory, as many bytes as `into` has.
    Read {
        /// Where the bytes go, in this order.
        into: &'a [LocalSegment],
        /// Where they come from.
        remote: RemoteSegment,
    },
}

/// Where the bytes of a send or write come from.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Registered memory; it must keep its content until the request completed.
    Registered(&'a [LocalSegment]),
    /// Any memory; taken over before `post_send` returns (`IBV_SEND_INLINE`).
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
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Where the message goes, in this order.
    pub into: &'a [LocalSegment],
}
