//! What a work request's identifier says.

/// Packs into the 64 bits of `wr_id`: kind (8 bits), connection (24 bits), value (32 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkId {
    pub kind: Kind,
    /// Key of the connection within its queue.
    pub connection: u32,
    pub value: u32,
}

/// What a request was posted for, and what the value means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A receive; the value is its slot.
    Receive,
    /// A send; the value is how many sends this completion stands for.
    Send,
    /// A READ; the value is the read's number.
    Read,
    /// A receive of a shared receive queue; the value is its slot. Which connection it was for, the completion says.
    SharedReceive,
}

impl WorkId {
    /// Most connections of a queue.
    pub const MAX_CONNECTIONS: u32 = 1 << 24;

    pub fn to_bits(self) -> u64 {
        let kind: u64 = match self.kind {
            Kind::Receive => 0,
            Kind::Send => 1,
            Kind::Read => 2,
            Kind::SharedReceive => 3,
        };
        kind << 56 | u64::from(self.connection % Self::MAX_CONNECTIONS) << 32 | u64::from(self.value)
    }

    /// Identifiers are our own, so an unknown kind can't come; it would be taken for a READ.
    pub fn from_bits(bits: u64) -> Self {
        let kind = match bits >> 56 {
            0 => Kind::Receive,
            1 => Kind::Send,
            3 => Kind::SharedReceive,
            _ => Kind::Read,
        };
        Self { kind, connection: (bits >> 32) as u32 % Self::MAX_CONNECTIONS, value: bits as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survives_the_way_through_the_device() {
        for kind in [Kind::Receive, Kind::Send, Kind::Read, Kind::SharedReceive] {
            for (connection, value) in [(0, 0), (1, u32::MAX), (WorkId::MAX_CONNECTIONS - 1, 7)] {
                let id = WorkId { kind, connection, value };
                assert_eq!(WorkId::from_bits(id.to_bits()), id);
            }
        }
    }
}
