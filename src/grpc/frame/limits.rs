//! The limits that each end announces.

use super::violation::CallViolation;

/// The limits of one end, which the other end keeps within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::grpc) struct Limits {
    /// The number of calls that the peer may have open.
    pub(in crate::grpc) streams: u32,
    /// The length of a head: names, values, and 32 bytes for each.
    pub(in crate::grpc) head_bytes: u32,
    /// The cost of what the peer may send on a stream before the first credit.
    pub(in crate::grpc) window: u32,
    /// The number of entries in the table of the peer's heads.
    pub(in crate::grpc) table_entries: u32,
    /// The length of these entries, counted as heads are.
    pub(in crate::grpc) table_bytes: u32,
}

impl Limits {
    /// The length of encoded limits, in bytes.
    pub(in crate::grpc) const LENGTH: usize = 20;

    /// Returns the payload of a SETTINGS frame.
    pub(in crate::grpc) fn encode(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        let Self { streams, head_bytes, window, table_entries, table_bytes } = *self;
        let (fields, _) = bytes.as_chunks_mut::<4>();
        for (field, value) in fields.iter_mut().zip([streams, head_bytes, window, table_entries, table_bytes])
        {
            *field = value.to_le_bytes();
        }
        bytes
    }

    /// Reads the payload of a SETTINGS frame. Later versions may add fields at its end.
    ///
    /// # Errors
    /// The payload is too short.
    pub(in crate::grpc) fn decode(payload: &[u8]) -> Result<Self, CallViolation> {
        let (fields, _) = payload.as_chunks::<4>();
        let &[streams, head_bytes, window, table_entries, table_bytes, ..] = fields else {
            return Err(CallViolation::Truncated { needed: Self::LENGTH, left: payload.len() });
        };
        let read = u32::from_le_bytes;
        Ok(Self {
            streams: read(streams),
            head_bytes: read(head_bytes),
            window: read(window),
            table_entries: read(table_entries),
            table_bytes: read(table_bytes),
        })
    }
}
