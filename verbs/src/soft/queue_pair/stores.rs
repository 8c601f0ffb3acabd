//! The choice of the store instructions for a WRITE: through the cache, or past the cache.
//!
//! After the peer's core has read a cache line, our core must take the line back before a store to it. This dominates the cost
//! of a write: on two cores of an EPYC 64 KiB took 29 µs, 1 MiB 450 µs. Past the cache, these writes took 4.7 and 57 µs, and
//! the other core read the bytes as fast as before. Lines that the peer's core has not read cost no such delay, and stores
//! through the cache are then faster: 1 MiB in 24 µs. The faster kind depends on the peer's use of its memory. Therefore this
//! module tries both kinds, and uses the faster kind for each class of lengths.
//!
//! Messages (Sends) shorter than 32 MiB always go through the cache, because their receiver reads them from the cache at once.
//! gRPC at 1 MiB took a fifth longer when messages, too, went past the cache.

use std::time::Duration;

/// The kind of store instructions that copy a request's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stores {
    Cached,
    Streaming,
}

/// The measured speed of the requests of one queue pair.
#[derive(Debug, Default)]
pub(super) struct Chooser {
    classes: [Class; CLASSES],
}

/// Requests shorter than this always go through the cache.
const SHORTEST: u64 = 2 << 10;

/// Requests of at least this length always go past the cache, because they are as long as the last-level cache and would not
/// stay there.
pub(super) const PAST_CACHES: u64 = 32 << 20;

/// Number of length classes: powers of two from the shortest on.
const CLASSES: usize = (PAST_CACHES / SHORTEST).ilog2() as usize;

/// Number of requests of a trial. The first request does not count, because the other kind has left the cache in a different
/// state.
const TRIAL: u32 = 4;

/// Number of requests before the first trial, and between two trials at least and at most. The interval doubles after each
/// trial that does not change the choice.
const FIRST: u32 = 8;
const INTERVAL: u32 = 64;
const LONGEST: u32 = 4096;

/// Number of requests of a window. The fastest of them counts as the present speed, because others may have been interrupted.
const WINDOW: u32 = 16;

/// Factor of the present cost that the other kind must stay below.
const MARGIN: f64 = 0.85;

#[derive(Debug)]
struct Class {
    chosen: Stores,
    /// Number of requests that remain in the trial.
    trial: u32,
    until_trial: u32,
    interval: u32,
    /// Lowest cost in nanoseconds for a byte: in the trial, in this window, and in the window before.
    trial_best: f64,
    best: f64,
    best_before: f64,
    in_window: u32,
}

impl Default for Class {
    fn default() -> Self {
        Self {
            chosen: Stores::Cached,
            trial: 0,
            until_trial: FIRST,
            interval: INTERVAL,
            trial_best: f64::INFINITY,
            best: f64::INFINITY,
            best_before: f64::INFINITY,
            in_window: 0,
        }
    }
}

impl Chooser {
    /// Returns the stores for a request of `length` bytes; `None` if the request is so short or so long that there is no
    /// choice, and so no time to record.
    pub(super) fn choose(&self, length: u64) -> Option<Stores> {
        let class = &self.classes[class_of(length)?];
        Some(if class.trial > 0 { other(class.chosen) } else { class.chosen })
    }

    /// Records that a request of `length` bytes took `time` with the chosen stores.
    pub(super) fn record(&mut self, length: u64, time: Duration) {
        if let Some(class) = class_of(length) {
            self.classes[class].record(time.as_nanos() as f64 / length as f64);
        }
    }
}

impl Class {
    fn record(&mut self, cost: f64) {
        if self.trial > 0 {
            if self.trial < TRIAL {
                self.trial_best = self.trial_best.min(cost);
            }
            self.trial -= 1;
            if self.trial == 0 {
                self.decide();
            }
            return;
        }
        self.best = self.best.min(cost);
        self.in_window += 1;
        if self.in_window == WINDOW {
            (self.best_before, self.best, self.in_window) = (self.best, f64::INFINITY, 0);
        }
        self.until_trial -= 1;
        if self.until_trial == 0 {
            (self.trial, self.trial_best) = (TRIAL, f64::INFINITY);
        }
    }

    /// Ends the trial: changes the choice if the other kind was faster by the margin.
    fn decide(&mut self) {
        if self.trial_best < MARGIN * self.best.min(self.best_before) {
            self.chosen = other(self.chosen);
            self.interval = INTERVAL;
            (self.best_before, self.best, self.in_window) = (self.trial_best, f64::INFINITY, 0);
        } else {
            self.interval = (2 * self.interval).min(LONGEST);
        }
        self.until_trial = self.interval;
    }
}

fn other(stores: Stores) -> Stores {
    match stores {
        Stores::Cached => Stores::Streaming,
        Stores::Streaming => Stores::Cached,
    }
}

fn class_of(length: u64) -> Option<usize> {
    let either = (SHORTEST..PAST_CACHES).contains(&length);
    either.then(|| (length / SHORTEST).ilog2() as usize)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    const LENGTH: u64 = 1 << 20;

    /// Carries out `count` requests. Returns how many of them went past the cache.
    fn run(chooser: &mut Chooser, count: u32, cached: u64, streaming: u64) -> u32 {
        let mut streamed = 0;
        for _ in 0..count {
            let stores = chooser.choose(LENGTH).unwrap();
            streamed += u32::from(stores == Stores::Streaming);
            let micros = if stores == Stores::Cached { cached } else { streaming };
            chooser.record(LENGTH, Duration::from_micros(micros));
        }
        streamed
    }

    #[test]
    fn the_faster_kind_is_found_soon_and_the_other_seldom_tried() {
        let mut chooser = Chooser::default();
        assert_eq!(run(&mut chooser, FIRST, 450, 57), 0);
        assert_eq!(run(&mut chooser, TRIAL, 450, 57), TRIAL);
        let streamed = run(&mut chooser, 1000, 450, 57);
        assert!((980..1000).contains(&streamed), "{streamed}");
        let mut chooser = Chooser::default();
        let streamed = run(&mut chooser, 1000, 24, 57);
        assert!((4..=20).contains(&streamed), "{streamed}");
    }

    #[test]
    fn a_change_of_speed_is_noticed() {
        let mut chooser = Chooser::default();
        run(&mut chooser, 300, 24, 57);
        run(&mut chooser, 2000, 450, 57);
        assert!(run(&mut chooser, 100, 450, 57) >= 96);
        run(&mut chooser, 2000, 24, 57);
        assert!(run(&mut chooser, 100, 24, 57) <= 4);
    }

    #[test]
    fn little_faster_is_not_worth_a_change_and_interruptions_are_overlooked() {
        let mut chooser = Chooser::default();
        assert!(run(&mut chooser, 1000, 100, 90) <= 20);
        let mut chooser = Chooser::default();
        let mut streamed = 0;
        for round in 0..300 {
            // Every fifth request, those of the trials included, takes much longer.
            let factor = if round % 5 == 0 { 100 } else { 1 };
            streamed += run(&mut chooser, 1, 24 * factor, 57 * factor);
        }
        assert!(streamed <= 12, "{streamed}");
    }

    #[test]
    fn short_and_long_requests_have_no_choice_and_lengths_are_separate() {
        let mut chooser = Chooser::default();
        for length in [0, 1, SHORTEST - 1, PAST_CACHES, u64::MAX] {
            assert_eq!(chooser.choose(length), None);
            chooser.record(length, Duration::from_secs(1));
        }
        run(&mut chooser, 100, 450, 57);
        assert_eq!(chooser.choose(LENGTH), Some(Stores::Streaming));
        for length in [SHORTEST, LENGTH / 2, 2 * LENGTH, PAST_CACHES - 1] {
            assert_eq!(chooser.choose(length), Some(Stores::Cached));
        }
    }
}
