//! The settings of a connection, the messages that the protocol writes itself, and the codes of an abort.

use std::fmt;
use std::time::Duration;

use crate::wire::{Chunk, Header, MAX_CHUNKS};

/// The settings of a connection. The peer's hello has the number and the length of the peer's slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Receive slots of this side, all posted at the start.
    pub receive_slots: u32,
    /// The length of each slot of this side in bytes, header included.
    pub slot_size: u32,
    /// Receive slots of the peer, all posted at the start.
    pub peer_slots: u32,
    /// The length of each slot of the peer in bytes, header included.
    pub peer_slot_size: u32,
    /// The number of sends that may be outstanding on the local queue, without READs.
    pub send_queue: u32,
    /// The number of READs that may be outstanding.
    pub max_reads: u32,
    /// The longest chunk that the peer may offer, in bytes.
    pub max_chunk: u64,
    /// The silence after which the peer is pinged; `None` for no pings.
    pub ping_interval: Option<Duration>,
    /// The time that the peer has to answer a ping.
    pub ping_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            receive_slots: 32,
            slot_size: 32 * 1024,
            peer_slots: 32,
            peer_slot_size: 32 * 1024,
            send_queue: 256,
            max_reads: 16,
            max_chunk: 16 << 20,
            ping_interval: None,
            ping_timeout: Duration::from_secs(10),
        }
    }
}

/// A setting that is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} of {value}, but it has to be from {least} to {most}")]
pub struct SettingsError {
    name: &'static str,
    value: u64,
    least: u64,
    most: u64,
}

impl Settings {
    /// The smallest number of slots. It leaves slots for data beside those kept for control messages.
    pub const MIN_SLOTS: u32 = 16;
    /// The largest number of slots.
    pub const MAX_SLOTS: u32 = 1 << 16;
    /// The smallest slot, in bytes. The longest control message fits.
    pub const MIN_SLOT_SIZE: u32 = (Header::LENGTH + MAX_CONTROL_BODY) as u32;
    /// The largest slot, in bytes.
    pub const MAX_SLOT_SIZE: u32 = 1 << 30;
    /// The smallest number of entries of the send queue.
    pub const MIN_SEND_QUEUE: u32 = 2 * Self::CONTROL_ENTRIES;
    /// The entries of the send queue that data leaves free for control messages.
    pub(super) const CONTROL_ENTRIES: u32 = 8;

    /// Returns how many of `slots` slots are kept for control messages.
    pub(super) fn reserve(slots: u32) -> u64 {
        u64::from(slots / 4).min(8)
    }

    pub(super) fn check(&self) -> Result<(), SettingsError> {
        let slots = |name, value| within(name, value, Self::MIN_SLOTS, Self::MAX_SLOTS);
        let size = |name, value| within(name, value, Self::MIN_SLOT_SIZE, Self::MAX_SLOT_SIZE);
        slots("receive slots", self.receive_slots)?;
        slots("the peer's receive slots", self.peer_slots)?;
        size("slot size", self.slot_size)?;
        size("the peer's slot size", self.peer_slot_size)?;
        within("send queue", self.send_queue, Self::MIN_SEND_QUEUE, u32::MAX)?;
        within("outstanding reads", self.max_reads, 1, u32::MAX)
    }
}

fn within(name: &'static str, value: u32, least: u32, most: u32) -> Result<(), SettingsError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let [value, least, most] = [value, least, most].map(u64::from);
    Err(SettingsError { name, value, least, most })
}

/// The longest body of a control message or an RTS, in bytes.
pub const MAX_CONTROL_BODY: usize = MAX_CHUNKS * Chunk::LENGTH;

/// A whole message, to be posted as one Send.
#[derive(Clone, Copy, Debug)]
pub struct ControlMessage {
    bytes: [u8; Header::LENGTH + MAX_CONTROL_BODY],
    length: usize,
}

impl ControlMessage {
    pub(super) fn new(header: &Header, body: &[u8]) -> Self {
        let mut bytes = [0; Header::LENGTH + MAX_CONTROL_BODY];
        let length = Header::LENGTH + body.len();
        bytes[..Header::LENGTH].copy_from_slice(&header.encode());
        bytes[Header::LENGTH..length].copy_from_slice(body);
        Self { bytes, length }
    }

    /// Returns header and body.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// The reason of an abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbortCode(pub u32);

impl AbortCode {
    /// The application dropped the stream while data was still coming.
    pub const CLOSED: Self = Self(1);
    /// The peer violated the protocol.
    pub const VIOLATION: Self = Self(2);
    /// The application reset the connection: the peer sees an error and not the end of the stream.
    pub const RESET: Self = Self(3);

    /// Returns true if the application ended the connection, as a TCP reset does, and no error was found.
    pub fn is_reset(self) -> bool {
        matches!(self, Self::CLOSED | Self::RESET)
    }
}

impl fmt::Display for AbortCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::CLOSED => f.write_str("it closed the stream without reading to its end"),
            Self::VIOLATION => f.write_str("it says that this end broke the protocol"),
            Self::RESET => f.write_str("its application reset the connection"),
            Self(code) => write!(f, "code {code}"),
        }
    }
}
