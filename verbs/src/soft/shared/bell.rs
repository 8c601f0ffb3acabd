//! The bell: the part of a completion queue that peers access. It shows which queue pairs have news for the queue, and whether
//! the owner sleeps and must be woken. News is a finished receive, a free receive that the peer waits for, or the
//! end of the queue pair.
//!
//! ```text
//!  word 0        1       2 … 65
//!  ┌─────────┬───────┬──────────────────┐   a peer that left news for queue pair 130 sets bit 130 % 64 of ready
//!  │ summary │ armed │ ready bitmap     │   word 2, then bit 2 of the summary, and writes the event descriptor
//!  └─────────┴───────┴──────────────────┘   only if `armed` was set
//! ```
//! A poll of the owner looks at one word, even if hundreds of idle queue pairs share the queue.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;

use rustix::event::EventfdFlags;

use super::mapping::{Mapping, Writers};

/// Maximum number of queue pairs of one completion queue.
pub(crate) const SLOTS: u32 = 64 * 64;
/// Bytes of the shared page.
const PAGE: u64 = 4096;

const SUMMARY: usize = 0;
const ARMED: usize = 1;
const READY: usize = 2;

/// The shared page of a completion queue and its event descriptor: our own, or a peer's.
#[derive(Debug)]
pub(crate) struct Bell {
    page: Mapping,
    event: OwnedFd,
}

impl Bell {
    /// Creates a bell. Returns the descriptor of its page, too.
    pub(crate) fn create() -> io::Result<(Self, OwnedFd)> {
        let (page, fd) = Mapping::create(PAGE as usize, Writers::All)?;
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok((Self { page, event }, fd))
    }

    /// Maps a peer's bell.
    pub(crate) fn import(page: &OwnedFd, event: OwnedFd) -> io::Result<Self> {
        Ok(Self { page: Mapping::import(page, PAGE, Writers::All)?, event })
    }

    /// Marks `slot` as having news, and wakes the owner if it sleeps. The caller must have written the news before.
    pub(crate) fn ring(&self, slot: u32) {
        let words = self.page.words();
        let slot = slot % SLOTS;
        let (word, bit) = (slot / 64, slot % 64);
        // SYNC: the owner takes the summary, then the word, then looks for the news. This read-modify-write comes
        // after the news, so an owner that has taken the bit sees the news. It is done even if the bit is already set,
        // because the owner may be taking the earlier bit at this moment.
        words[READY + word as usize].fetch_or(1 << bit, SeqCst);
        // SYNC: if the summary bit is still set here, the owner takes it after our ready bit was set, and finds that
        // bit.
        if words[SUMMARY].load(SeqCst) & (1 << word) == 0 {
            words[SUMMARY].fetch_or(1 << word, SeqCst);
        }
        self.wake();
    }

    /// Writes the event descriptor if the owner armed it.
    pub(crate) fn wake(&self) {
        let armed = &self.page.words()[ARMED];
        // SYNC: Dekker's algorithm with `arm`: the owner arms, then looks for news; a peer leaves news, then checks whether
        // the owner has armed.
        if armed.load(SeqCst) != 0 && armed.swap(0, SeqCst) != 0 {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Asks for one event. Called by the owner.
    pub(crate) fn arm(&self) {
        self.page.words()[ARMED].swap(1, SeqCst);
    }

    /// Takes back the request for an event. Called by the owner.
    pub(crate) fn disarm(&self) {
        self.page.words()[ARMED].store(0, SeqCst);
    }

    /// Returns whether any slot may have news. Called by the owner.
    pub(crate) fn is_ready(&self) -> bool {
        self.page.words()[SUMMARY].load(SeqCst) != 0
    }

    /// Takes the summary. Called by the owner.
    pub(crate) fn take_summary(&self) -> u64 {
        self.page.words()[SUMMARY].swap(0, SeqCst)
    }

    /// Takes ready word `word` (below 64). Called by the owner.
    pub(crate) fn take_word(&self, word: u32) -> u64 {
        self.page.words()[READY + word as usize].swap(0, SeqCst)
    }

    /// Puts back bits of a word that the owner took but did not handle. Called by the owner.
    pub(crate) fn put_back(&self, word: u32, bits: u64) {
        if bits != 0 {
            self.page.words()[READY + word as usize].fetch_or(bits, SeqCst);
            self.page.words()[SUMMARY].fetch_or(1 << word, SeqCst);
        }
    }

    /// Puts back summary bits whose words the owner did not take. Called by the owner.
    pub(crate) fn put_back_summary(&self, bits: u64) {
        if bits != 0 {
            self.page.words()[SUMMARY].fetch_or(bits, SeqCst);
        }
    }

    /// Takes the events that have come. Called by the owner.
    pub(crate) fn acknowledge(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.event, &mut count[..]);
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Overwrites the page, as a hostile peer could do.
    #[cfg(test)]
    pub(crate) fn scribble(&self, value: impl Fn(usize) -> u64) {
        for (index, word) in self.page.words().iter().enumerate() {
            word.store(value(index), SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use super::*;

    /// Takes everything that is ready, as a poller does.
    fn take(bell: &Bell, mut visit: impl FnMut(u32)) {
        let mut summary = bell.take_summary();
        while summary != 0 {
            let word = summary.trailing_zeros();
            summary &= summary - 1;
            let mut bits = bell.take_word(word);
            while bits != 0 {
                visit(word * 64 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }

    #[test]
    fn every_slot_is_found() {
        let (bell, _fd) = Bell::create().unwrap();
        for slot in 0..SLOTS {
            bell.ring(slot);
            let mut found = Vec::new();
            take(&bell, |slot| found.push(slot));
            assert_eq!(found, [slot]);
            assert!(!bell.is_ready());
        }
        bell.ring(SLOTS + 3);
        take(&bell, |slot| assert_eq!(slot, 3));
    }

    #[test]
    fn bits_that_are_put_back_are_found_again() {
        let (bell, _fd) = Bell::create().unwrap();
        bell.put_back(63, 1 << 63 | 1);
        bell.put_back(1, 0);
        let mut found = Vec::new();
        take(&bell, |slot| found.push(slot));
        assert_eq!(found, [63 * 64, 63 * 64 + 63]);
    }

    /// Two threads leave news in many slots while the owner takes them: no ring is lost.
    #[test]
    fn no_ring_is_lost() {
        const ROUNDS: u64 = 50_000;
        let (bell, _fd) = Bell::create().unwrap();
        let news: Vec<AtomicU64> = (0..256).map(|_| AtomicU64::new(0)).collect();
        let mut seen = vec![0; 256];
        std::thread::scope(|scope| {
            for thread in 0..2u64 {
                let (bell, news) = (&bell, &news);
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let slot = (round * 7 + thread * 3) % 128 * 2 + thread;
                        news[slot as usize].fetch_add(1, Relaxed);
                        bell.ring(slot as u32);
                    }
                });
            }
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
            while seen.iter().sum::<u64>() < 2 * ROUNDS {
                take(&bell, |slot| seen[slot as usize] = news[slot as usize].load(Relaxed));
                assert!(std::time::Instant::now() < deadline, "a ring was lost");
            }
        });
    }

    #[test]
    fn events_come_once_for_each_arming() {
        let (bell, _fd) = Bell::create().unwrap();
        let read = || rustix::io::read(bell.event(), &mut [0u8; 8][..]).is_ok();
        bell.ring(1);
        assert!(!read(), "not armed");
        bell.arm();
        bell.ring(1);
        bell.ring(2);
        assert!(read() && !read(), "one event");
        bell.arm();
        bell.disarm();
        bell.ring(3);
        assert!(!read(), "disarmed");
    }
}
