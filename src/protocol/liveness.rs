//! Whether the peer is still there.

use std::time::{Duration, Instant};

/// Pings a silent peer, and notices when it does not answer.
#[derive(Debug)]
pub(super) struct Liveness {
    interval: Option<Duration>,
    timeout: Duration,
    last_heard: Instant,
    /// A ping wants to be sent.
    pub(super) ping_due: bool,
    /// When the ping that was sent should have been answered.
    answer_by: Option<Instant>,
    /// When to look again until then: the answer may come at once, and nobody is woken by it.
    look_again: Instant,
    /// Pings sent; the nonce of the last.
    pub(super) pings: u64,
    /// The newest of them that was answered.
    pub(super) answered: u64,
    /// A nonce that wants to go back.
    pub(super) pong_due: Option<u64>,
}

impl Liveness {
    pub(super) fn new(interval: Option<Duration>, timeout: Duration, now: Instant) -> Self {
        Self {
            interval,
            timeout,
            last_heard: now,
            ping_due: false,
            answer_by: None,
            look_again: now,
            pings: 0,
            answered: 0,
            pong_due: None,
        }
    }

    /// Anything that arrives is a sign of life.
    pub(super) fn heard(&mut self, now: Instant) {
        self.last_heard = now;
        self.answer_by = None;
        self.ping_due = false;
    }

    /// Whether `nonce` is that of a ping sent.
    pub(super) fn is_ours(&self, nonce: u64) -> bool {
        nonce != 0 && nonce <= self.pings
    }

    /// The ping is being sent: its nonce.
    pub(super) fn ping(&mut self) -> u64 {
        self.ping_due = false;
        self.pings += 1;
        self.pings
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let interval = self.interval?;
        Some(self.answer_by.map_or(self.last_heard + interval, |answer_by| answer_by.min(self.look_again)))
    }

    /// Whether the peer has to be given up.
    pub(super) fn handle_timeout(&mut self, now: Instant) -> bool {
        let Some(interval) = self.interval else { return false };
        if let Some(answer_by) = self.answer_by {
            self.look_again = now + interval;
            return now >= answer_by;
        }
        if now < self.last_heard + interval {
            return false;
        }
        self.look_again = now + interval;
        // The time runs whether the ping can be sent or waits for a credit: a peer that gives none is no better.
        self.ping_due = true;
        self.answer_by = Some(now + self.timeout);
        false
    }
}
