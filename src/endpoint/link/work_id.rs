//! The identifier of a work request.

/// The content of the 64 bits of `wr_id`: kind (8 bits), connection (24 bits), value (32 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkId {
    /// Kind of the request.
    pub kind: WorkKind,
    /// Key of the connection within its queue.
    pub connection: u32,
    /// A number whose meaning depends on the kind.
    pub value: u32,
}

/// The kind of a work request, which gives the value its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkKind {
    /// A receive; the value is its slot.
    Receive,
    /// A send; the value is how many sends this completion stands for.
    Send,
    /// A READ; the value is the read's number.
    Read,
    /// A receive of a shared receive queue; the value is its slot. The completion names the queue pair.
    SharedReceive,
}

impl WorkId {
    /// Most connections of a queue.
    pub const MAX_CONNECTIONS: u32 = 1 << 24;

    /// Packs the identifier into a `wr_id`.
    #[inline]
    pub fn to_bits(self) -> u64 {
        let kind: u64 = match self.kind {
            WorkKind::Receive => 0,
            WorkKind::Send => 1,
            WorkKind::Read => 2,
            WorkKind::SharedReceive => 3,
        };
        kind << 56 | u64::from(self.connection % Self::MAX_CONNECTIONS) << 32 | u64::from(self.value)
    }

    /// Unpacks a `wr_id`. [`to_bits`](Self::to_bits) makes all identifiers, so there is no unknown kind. It would count as a
    /// READ.
    #[inline]
    pub fn from_bits(bits: u64) -> Self {
        let kind = match bits >> 56 {
            0 => WorkKind::Receive,
            1 => WorkKind::Send,
            3 => WorkKind::SharedReceive,
            _ => WorkKind::Read,
        };
        Self { kind, connection: (bits >> 32) as u32 % Self::MAX_CONNECTIONS, value: bits as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_bits_reverses_to_bits() {
        for kind in [WorkKind::Receive, WorkKind::Send, WorkKind::Read, WorkKind::SharedReceive] {
            for (connection, value) in [(0, 0), (1, u32::MAX), (WorkId::MAX_CONNECTIONS - 1, 7)] {
                let id = WorkId { kind, connection, value };
                assert_eq!(WorkId::from_bits(id.to_bits()), id);
            }
        }
    }
}
