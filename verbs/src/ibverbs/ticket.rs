//! How a completion of the device is traced to its request.

/// The identifier that the device gets with a request and returns with its completion: the queue pair, the
/// kind of request, and the position. (Some devices report neither kind nor queue with a failure.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) kind: RequestKind,
    /// The slot of the queue pair in the completion queue's table.
    pub(crate) slot: Slot,
    pub(crate) position: u32,
}

/// A slot in a completion queue's table of queue pairs. The generation tells a queue pair from the next one
/// at the slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) index: u16,
    /// 13 bits.
    pub(crate) generation: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Send,
    Write,
    Read,
    Receive,
    /// The first message on iWARP, in either direction.
    Hello,
    /// A receive of a shared receive queue; see [`Ticket::shared`].
    SharedReceive,
    /// The opening or closing of a window. Its position counts such requests alone.
    Window,
}

impl RequestKind {
    /// All kinds, each at its number in a ticket.
    const ALL: [Self; 7] = {
        use RequestKind::{Hello, Read, Receive, Send, SharedReceive, Window, Write};
        [Send, Write, Read, Receive, Hello, SharedReceive, Window]
    };
}

impl Ticket {
    pub(crate) fn to_bits(self) -> u64 {
        (self.kind as u64) << 61
            | u64::from(self.slot.generation & Slot::GENERATIONS) << 48
            | u64::from(self.slot.index) << 32
            | u64::from(self.position)
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        let kind = RequestKind::ALL.get((bits >> 61) as usize).copied().unwrap_or(RequestKind::Receive);
        let slot = Slot { index: (bits >> 32) as u16, generation: (bits >> 48) as u16 & Slot::GENERATIONS };
        Self { kind, slot, position: bits as u32 }
    }
}

/// Receives of shared receive queues. The completion names the queue pair that took the receive, so the
/// ticket names the queue that the receive was posted to.
impl Ticket {
    /// Mask of a queue's key.
    pub(crate) const SHARED_KEYS: u32 = (1 << 29) - 1;

    /// Makes the ticket of a receive at `position` of the queue with this key.
    pub(crate) fn shared(key: u32, position: u32) -> Self {
        let slot = Slot { index: key as u16, generation: (key >> 16) as u16 & Slot::GENERATIONS };
        Self { kind: RequestKind::SharedReceive, slot, position }
    }

    /// Returns the key of the queue.
    pub(crate) fn shared_key(self) -> u32 {
        u32::from(self.slot.generation) << 16 | u32::from(self.slot.index)
    }
}

impl Slot {
    /// Mask of a generation.
    pub(crate) const GENERATIONS: u16 = (1 << 13) - 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_survives_the_round_trip() {
        use RequestKind::{Hello, Read, Receive, Send, SharedReceive, Window, Write};
        for kind in [Send, Write, Read, Receive, Hello, SharedReceive, Window] {
            for (index, generation, position) in
                [(0, 0, 0), (7, 3, 9), (u16::MAX, Slot::GENERATIONS, u32::MAX)]
            {
                let ticket = Ticket { kind, slot: Slot { index, generation }, position };
                assert_eq!(Ticket::from_bits(ticket.to_bits()), ticket);
            }
        }
    }
}
