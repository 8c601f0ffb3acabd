//! How a thread waits for other ranks: it spins, then yields, then naps.

use std::time::{Duration, Instant};

/// The looks at memory between two looks at the clock.
const LOOKS: u32 = 1000;
const SPIN: Duration = Duration::from_micros(100);
const YIELD: Duration = Duration::from_millis(1);
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// The waiting of one thread.
#[derive(Debug)]
pub(super) struct Pause {
    /// Whether more ranks than cores run on this host. Then a rank that spins keeps another from running.
    crowded: bool,
    looks: u32,
    began: Option<Instant>,
    yields: bool,
    has_moved: bool,
}

impl Pause {
    pub(super) fn new(crowded: bool) -> Self {
        Self { crowded, looks: 0, began: None, yields: crowded, has_moved: false }
    }

    /// Notes that something has moved.
    pub(super) fn moved(&mut self) {
        self.began = None;
        self.yields = self.crowded;
        self.has_moved = true;
    }

    /// Returns whether something has moved since this value was made.
    pub(super) fn has_moved(&self) -> bool {
        self.has_moved
    }

    /// Waits a little. Returns the time if it read the clock.
    pub(super) fn pause(&mut self) -> Option<Instant> {
        self.looks += 1;
        if self.yields {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        if self.looks < if self.yields { LOOKS / 20 } else { LOOKS } {
            return None;
        }
        self.looks = 0;
        let now = Instant::now();
        let waited = now.saturating_duration_since(*self.began.get_or_insert(now));
        self.yields = self.crowded || waited > SPIN;
        if waited > YIELD {
            std::thread::sleep((waited / 16).min(LONGEST_NAP));
            // After a nap, each look is a nap, until something moves.
            self.looks = LOOKS;
            return Some(Instant::now());
        }
        Some(now)
    }
}
