//! The side of a connection that measures.

use super::peer::{Peer, Role};
use super::side::{Opcode, Polled, RECEIVES, Side, pin, relax};

/// The side that measures, and its peer in another process.
pub(crate) struct Initiator {
    /// Dropped before `side`, so that the peer has ended before its connection ends.
    _peer: Peer,
    side: Side,
    opcode: Opcode,
    batch: u64,
    stamp: u64,
    /// Number of messages that the peer has not acknowledged, or that have no completion yet.
    outstanding: u64,
}

/// Returns the number of messages after which the peer acknowledges.
pub(crate) fn batch_length(length: usize) -> u64 {
    (65_536 / length as u64).clamp(1, 64)
}

impl Initiator {
    /// Makes an initiator for [`round_trip`](Self::round_trip).
    pub(crate) fn for_latency(opcode: Opcode, length: usize) -> Self {
        Self::new(Role::Echo, opcode, length)
    }

    /// Makes an initiator for [`batch`](Self::batch).
    pub(crate) fn for_bandwidth(opcode: Opcode, length: usize) -> Self {
        Self::new(Role::Sink, opcode, length)
    }

    fn new(role: Role, opcode: Opcode, length: usize) -> Self {
        assert!(length >= 8 && length.is_multiple_of(8), "messages have whole words");
        let mut side = Side::new(length);
        let peer = Peer::start(role, opcode, length, &mut side);
        pin(0);
        Self { _peer: peer, side, opcode, batch: batch_length(length), stamp: 0, outstanding: 0 }
    }

    pub(crate) fn side(&self) -> &Side {
        &self.side
    }

    /// Runs one round trip.
    pub(crate) fn round_trip(&mut self) {
        match self.opcode {
            Opcode::Send | Opcode::SendWithImm | Opcode::WriteWithImm => {
                self.side.post(self.opcode, false);
                while self.poll().receives == 0 {
                    relax();
                }
            }
            Opcode::Write => {
                self.stamp += 1;
                self.side.stamp(self.stamp);
                self.side.post(self.opcode, false);
                while !self.side.is_stamped(self.stamp) {
                    relax();
                }
                if self.stamp.is_multiple_of(64) {
                    self.poll();
                }
            }
            Opcode::Read => self.run_one_sided(1),
        }
    }

    /// Returns the number of messages of one batch.
    pub(crate) fn batch_length(&self) -> u64 {
        self.batch
    }

    /// Sends a batch of messages. This function does not wait for the batch: it only waits while the messages on the way would be too
    /// many for the peer's receives, or more than four batches.
    pub(crate) fn batch(&mut self) {
        let is_one_sided = !self.opcode.is_received();
        (1..self.batch).for_each(|_| self.side.post(self.opcode, false));
        self.side.post(self.opcode, is_one_sided);
        self.outstanding += self.batch;
        while self.outstanding + self.batch > RECEIVES.min(4 * self.batch) {
            self.take_acknowledgements();
        }
    }

    /// Waits until the peer has received all messages.
    pub(crate) fn drain(&mut self) {
        while self.outstanding > 0 {
            self.take_acknowledgements();
        }
    }

    /// Takes the peer's acknowledgements of batches. Those of a one-sided opcode are the completions of the last requests.
    fn take_acknowledgements(&mut self) {
        let polled = self.poll();
        let batches = if self.opcode.is_received() { polled.receives } else { polled.sends };
        self.outstanding -= batches * self.batch;
        relax();
    }

    fn poll(&mut self) -> Polled {
        let polled = self.side.poll();
        assert_eq!(polled.failed, None);
        polled
    }

    fn run_one_sided(&mut self, count: u64) {
        (1..count).for_each(|_| self.side.post(self.opcode, false));
        self.side.post(self.opcode, true);
        // Signalled requests are the last one of this batch, and one of every `SIGNAL_EVERY` requests.
        while self.poll().sends == 0 {
            relax();
        }
    }
}
