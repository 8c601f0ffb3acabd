//! The flags before messages. Each message has one byte for compression, and four bytes of length before it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use tonic_rdma_verbs::internal::lock;

/// Number of bytes before each message.
pub(super) const PREFIX: usize = 5;

/// Maximum number of stored flags. Later flags are dropped, so that a peer can't fill memory.
const WAITING: usize = 64 << 10;

/// The compression flags of messages, in order. Clones share one queue.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags {
    shared: Arc<Mutex<VecDeque<bool>>>,
}

impl Flags {
    /// Removes the first flag, and returns it.
    pub(crate) fn next(&self) -> Option<bool> {
        self.lock().pop_front()
    }

    /// Removes all flags, and returns them.
    pub(crate) fn rest(&self) -> Vec<bool> {
        self.lock().drain(..).collect()
    }

    /// Adds the flag of the next message.
    pub(crate) fn push(&self, compressed: bool) {
        let mut waiting = self.lock();
        if waiting.len() < WAITING {
            waiting.push_back(compressed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<bool>> {
        lock(&self.shared)
    }
}

impl<const COUNT: usize> From<[bool; COUNT]> for Flags {
    fn from(flags: [bool; COUNT]) -> Self {
        Self { shared: Arc::new(Mutex::new(flags.into())) }
    }
}

/// Finds the flags in a body, with any division into frames.
#[derive(Debug)]
pub(super) struct Scanner {
    prefix: [u8; PREFIX],
    /// Number of bytes of the prefix that have arrived.
    filled: usize,
    /// Number of bytes of the message that are missing.
    remaining: usize,
    flags: Flags,
}

impl Scanner {
    pub(super) fn new(flags: Flags) -> Self {
        Self { prefix: [0; PREFIX], filled: 0, remaining: 0, flags }
    }

    pub(super) fn scan(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let skipped = self.remaining.min(data.len());
            self.remaining -= skipped;
            data = &data[skipped..];
            let taken = data.len().min(PREFIX - self.filled);
            self.prefix[self.filled..self.filled + taken].copy_from_slice(&data[..taken]);
            self.filled += taken;
            data = &data[taken..];
            if self.filled == PREFIX {
                let (compressed, length) = parse(self.prefix);
                self.flags.push(compressed);
                (self.filled, self.remaining) = (0, length);
            }
        }
    }
}

/// Returns whether a message is compressed, and its length.
pub(super) fn parse([flag, length @ ..]: [u8; PREFIX]) -> (bool, usize) {
    (flag != 0, u32::from_be_bytes(length) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_found_with_any_division_of_the_body() {
        let mut body = Vec::new();
        let messages = [(true, 300usize), (false, 0), (true, 0), (false, 1), (true, 5)];
        for (compressed, length) in messages {
            body.push(u8::from(compressed));
            body.extend((length as u32).to_be_bytes());
            body.extend(std::iter::repeat_n(1, length));
        }
        for size in [1, 2, 3, 4, 5, 6, 7, 100, 304, 305, 306, body.len()] {
            let flags = Flags::default();
            let mut scanner = Scanner::new(flags.clone());
            body.chunks(size).for_each(|chunk| scanner.scan(chunk));
            assert_eq!(flags.rest(), messages.map(|(compressed, _)| compressed), "frames of {size} bytes");
        }
    }

    #[test]
    fn stored_flags_are_bounded() {
        let flags = Flags::default();
        let mut scanner = Scanner::new(flags.clone());
        for _ in 0..WAITING + 10 {
            scanner.scan(&[0; PREFIX]);
        }
        assert_eq!(flags.rest().len(), WAITING);
        assert_eq!(flags.next(), None);
    }
}
